"""A paper's numbers beside ours, and what is said of its claims."""

import pandas as pd
import pytest
from test_statistics import METRIC, results, tables_of

from fedbc_lightning import ConfigurationError
from fedbc_lightning.studies.paper import Claim, Paper
from fedbc_lightning.studies.statistics import paired_differences, summarise
from fedbc_lightning.studies.study import Study

VALUES = {"a": {"all": "83.61 ± 0.43"}, "b": {"all": "87.83"}, "c": {}}
PAPER = Paper("Paper, Table 1", METRIC, [], VALUES, [Claim("b", ["a", "c"])])


def make(**given):
    algorithms = {name: {"algorithm": "FedAvg"} for name in "abc"}
    return Study("x.yaml", algorithms, **{"metrics": [METRIC], "papers": {"p": PAPER}, **given})


def rows_of(table, study, **readings):
    """All tables; ``readings`` are further ones of the same runs beside that of the last round."""
    differences = paired_differences(table, [METRIC], study.reference_name)
    read = {name: {"last": table, **readings} for name in study.papers}
    return list(tables_of(study, summarise(table, [METRIC]), differences, read))


def test_numbers_stand_beside_ours_and_claims_are_judged_by_paired_intervals():
    table = results({"a": [0.80, 0.70, 0.75], "b": [0.85, 0.76, 0.80], "c": [0.90, 0.60, 0.80]})
    (caption, numbers), (said, claims), *_ = rows_of(table, make())
    assert "ours, read at different rounds, and Paper, Table 1" in caption
    assert numbers[1:] == [
        ["a, last round", "75.00 ± 5.00"], ["a, paper", "83.61 ± 0.43"],
        ["b, last round", "80.33 ± 4.51"], ["b, paper", "87.83"],
        ["c, last round", "76.67 ± 15.28"], ["c, paper", "-"],
    ]  # fmt: skip
    assert "95 % interval of the paired difference" in said
    assert claims[1] == ["b better than a, last round", "holds: +5.33 [+3.90, +6.77] (paper +4.22)"]
    assert claims[2][0] == "b better than c, last round"
    assert claims[2][1].startswith("open: +3.67 [")
    assert "paper" not in claims[2][1]


def test_another_method_of_the_same_name_is_said_to_be_one():
    paper = Paper("P", METRIC, values=VALUES, claims=[Claim("b", ["a"])], other_methods={"a": "it starts from zero"})
    table = results({"a": [0.80, 0.70, 0.75], "b": [0.85, 0.76, 0.80], "c": [0.90, 0.60, 0.80]})
    (caption, numbers), (said, claims), *_ = rows_of(table, make(papers={"p": paper}))
    assert caption.endswith(". a there is another method than here: it starts from zero")
    assert said.endswith("is open else. a there is another method than here: it starts from zero")
    assert numbers[2] == ["a, paper", "83.61 ± 0.43"]
    assert claims[1][1].startswith("holds")
    without = make(papers={"p": paper}, only=["b", "c"], reference="b")
    assert "another method" not in rows_of(table[table["algorithm"] != "a"], without)[0][0]


def test_a_claim_that_fails_and_one_of_a_single_seed():
    table = results({"a": [0.80, 0.70, 0.75], "b": [0.70, 0.61, 0.65], "c": [0.1, 0.1, 0.1]})
    assert rows_of(table, make())[1][1][1][1].startswith("fails: −9.67 [")
    single = results({"a": [0.8], "b": [0.9], "c": [0.1]})
    assert rows_of(single, make(seeds=1))[1][1][1][1] == "open: +10.00 (paper +4.22)"
    assert rows_of(single, make())[1][1][1][1] == "open: +10.00 (1 of 3 pairs) (paper +4.22)"


def test_a_metric_that_should_be_small():
    paper = Paper("p", "loss/global", claims=[Claim("b", ["a"])])
    study = make(metrics=["loss/global"], papers={"p": paper})
    table = results({"a": [0.8, 0.7, 0.75], "b": [0.5, 0.41, 0.45]}).rename(columns={METRIC: "loss/global"})
    differences = paired_differences(table, study.metrics, "a")
    read = {"p": {"last": table}}
    (said, claims), *_ = tables_of(study, summarise(table, study.metrics), differences, read)  # no values: claims alone
    assert "What it concludes (p)" in said
    assert claims[1][1].startswith("holds: −0.2967")


@pytest.mark.parametrize(
    ("paper", "message"),
    [
        (Paper("", "x"), "papers.p.metric: the study has no 'x'"),
        (Paper("", METRIC, values={"d": {}}), "papers.p: the study has no 'd'; there is: a, b, c"),
        (Paper("", METRIC, values={"a": {"E": "1"}}), "papers.p: the study has no 'E'"),
        (Paper("", METRIC, claims=[Claim("a", ["b"], ["E = 1"])]), "papers.p: the study has no 'E = 1'"),
    ],
)
def test_names_must_be_those_of_the_study(paper, message):
    with pytest.raises(ConfigurationError, match=message):
        make(papers={"p": paper})


def test_a_scaled_study_says_so_and_lies_elsewhere():
    study = make(scale=0.3, seeds=5, overrides={"trainer.max_rounds": 200})
    assert study.seed_list == [0, 1]
    assert make(scale=0.01, seeds=5).seed_list == [0, 1]  # of one seed there is no interval
    assert make(scale=0.01, seeds=1).seed_list == [0]
    assert study.name == "study_scale_0.3"
    assert study.run("all", study.methods[0], 0).settings["trainer.max_rounds"] == 60
    table = results({"a": [0.8, 0.7], "b": [0.9, 0.8], "c": [0.1, 0.1]})
    assert all("SCALED: 0.3 of the study's rounds and seeds" in text for text, _ in rows_of(table, study))
    with pytest.raises(ConfigurationError, match=r"got None; give a number in overrides"):
        make(scale=0.5).run("all", study.methods[0], 0)


FACTORS = [{"C = 1": {"x": 1}, "C = 2": {"x": 2}}, {"e = 1.1": {"y": 3}, "e = 1.2": {"y": 4}, "e = 1.3": None}]


def test_levels_of_factors_are_crossed_and_laid_out_as_in_the_papers():
    cells = {"a": {"C = 1": {"e = 1.1": 70.0}, "C = 2": {"e = 1.2": "71.00 ± 0.10"}}, "b": {}}
    paper = Paper("P", METRIC, values=cells, claims=[Claim("b", ["a"], ["C = 2"])])
    study = make(factors=FACTORS, papers={"p": paper}, only=["a", "b"], seeds=2)
    assert study.variants["C = 2, e = 1.1"] == {"x": 2, "y": 3}
    assert len(study.variants) == 6
    parts = [
        results({"a": [0.70, 0.71], "b": [0.80, 0.812]}).assign(variant=name)
        for name in ("C = 1, e = 1.1", "C = 2, e = 1.2")
    ]
    (_, numbers), (_, claims), (_, plain), (_, differences) = rows_of(pd.concat(parts), study)
    assert numbers == [
        ["", "e = 1.1", "e = 1.2", "e = 1.3"],
        ["C = 1: a, last round", "70.50 ± 0.71", "-", "-"],
        ["C = 1: a, paper", "70.00", "-", "-"],
        ["C = 1: b, last round", "80.60 ± 0.85", "-", "-"],
        ["C = 1: b, paper", "-", "-", "-"],
        ["C = 2: a, last round", "-", "70.50 ± 0.71", "-"],
        ["C = 2: a, paper", "-", "71.00 ± 0.10", "-"],
        ["C = 2: b, last round", "-", "80.60 ± 0.85", "-"],
        ["C = 2: b, paper", "-", "-", "-"],
    ]
    assert claims[1:] == [
        ["C = 1: b better than a, last round", "-", "-", "-"],
        ["C = 2: b better than a, last round", "-", "holds: +10.10 [+8.83, +11.37]", "-"],
    ]
    assert plain[2] == ["C = 1: b", "80.60 ± 0.85", "-", "-"]
    bold = "**+10.10 [+8.83, +11.37], p 0.013**"
    assert differences[1:] == [["C = 1: b", bold, "-", "-"], ["C = 2: b", "-", bold, "-"]]


def test_a_table_of_a_part_of_the_study():
    papers = {
        "p": Paper("P", METRIC, ["C = 2"], {"a": {"e = 1.1": "70.00"}, "b": {}}),
        "q": Paper("Q", METRIC, ["C = 1"]),
    }
    study = make(factors=FACTORS, papers=papers, seeds=1)
    table = results({"a": [0.70], "b": [0.80], "c": [0.5]}).assign(variant="C = 2, e = 1.1")
    (caption, numbers), (whole, _), _ = rows_of(table, study)
    assert "and P;" in caption  # and none of Q, which shows no algorithm
    assert numbers[1:] == [
        ["a, last round", "70.00", "-", "-"], ["a, paper", "70.00", "-", "-"],
        ["b, last round", "80.00", "-", "-"], ["b, paper", "-", "-", "-"],
    ]  # fmt: skip
    assert "C = 2" not in whole
    study.narrow(["C = 2", "e = 1.1"])
    (caption, numbers), (whole, plain), _ = rows_of(table, study)
    assert numbers[0] == ["", "e = 1.1"]
    assert [row[1] for row in numbers[1:]] == ["70.00", "70.00", "80.00", "-"]
    assert whole == f"{METRIC} (global model z) in %; seed 0; C = 2; last round"
    assert plain[1] == ["a", "70.00"]


def test_readings_of_other_rounds_stand_beside_the_papers_numbers_and_are_judged_one_by_one():
    last = results({"a": [0.80, 0.70, 0.75], "b": [0.85, 0.76, 0.80], "c": [0.90, 0.60, 0.80]})
    best = results({"a": [0.84, 0.83, 0.84], "b": [0.81, 0.80, 0.82], "c": [0.90, 0.90, 0.90]})
    (caption, numbers), (_, claims), *_ = rows_of(last, make(), best_on_test=best)
    assert "the best round is chosen on the test data, which flatters every method" in caption
    assert [row[0] for row in numbers[1:4]] == ["a, last round", "a, best round on test data", "a, paper"]
    assert numbers[2][1] == "83.67 ± 0.58"
    assert [row[1].partition(":")[0] for row in claims[1:3]] == ["holds", "fails"]


def test_two_claims_on_one_pair_keep_each_others_verdicts():
    claims = [Claim("b", ["a"], ["C = 1"]), Claim("b", ["a"], ["C = 2"])]
    study = make(factors=FACTORS, papers={"p": Paper("P", METRIC, claims=claims)}, only=["a", "b", "e = 1.1"], seeds=2)
    table = pd.concat(results({"a": [0.1, 0.2], "b": [0.3, 0.41]}).assign(variant=name) for name in study.variants)
    (_, (_, *found)), *_ = rows_of(table, study)
    assert [row[1].partition(":")[0] for row in found] == ["holds", "holds"]
