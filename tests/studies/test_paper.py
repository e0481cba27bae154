"""A paper's numbers beside ours, and what is said of its claims."""

import math

import pytest
from test_statistics import METRIC, results

from fedbc_lightning import ConfigurationError
from fedbc_lightning.studies.paper import Claim, Paper
from fedbc_lightning.studies.statistics import paired_differences, summarise
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.tables import tables

VALUES = {"a": {"all": "83.61 ± 0.43"}, "b": {"all": "87.83"}, "c": {}}
PAPER = Paper("Paper, Table 1", METRIC, VALUES, [Claim("b", ["a", "c"])])


def make(**given):
    algorithms = {name: {"algorithm": "FedAvg"} for name in "abc"}
    return Study("x.yaml", algorithms, **{"metrics": [METRIC], "paper": PAPER, **given})


def rows_of(table, study):
    differences = paired_differences(table, [METRIC], "a")
    return list(tables(study, table, summarise(table, [METRIC]), differences))


def test_numbers_stand_beside_ours_and_claims_are_judged_by_paired_intervals():
    table = results({"a": [0.80, 0.70, 0.75], "b": [0.85, 0.76, 0.80], "c": [0.90, 0.60, 0.80]})
    (caption, numbers), (said, claims), *_ = rows_of(table, make())
    assert "in parentheses Paper, Table 1" in caption
    assert numbers[1:] == [
        ["a", "75.00 ± 5.00 (83.61 ± 0.43)"], ["b", "80.33 ± 4.51 (87.83)"], ["c", "76.67 ± 15.28 (-)"],
    ]  # fmt: skip
    assert "95 % interval of the paired difference" in said
    assert claims[1] == ["b > a", "holds: +5.33 [+3.90, +6.77] (paper +4.22)"]
    assert claims[2][0] == "b > c"
    assert claims[2][1].startswith("open: +3.67 [")
    assert "paper" not in claims[2][1]


def test_a_claim_that_fails_and_one_of_a_single_seed():
    table = results({"a": [0.80, 0.70, 0.75], "b": [0.70, 0.61, 0.65], "c": [0.1, 0.1, 0.1]})
    assert rows_of(table, make())[1][1][1][1].startswith("fails: −9.67 [")
    single = results({"a": [0.8], "b": [0.9], "c": [0.1]})
    assert rows_of(single, make())[1][1][1][1] == "open: +10.00 (paper +4.22)"


def test_a_metric_that_should_be_small():
    paper = Paper("p", "global/test_loss", {}, [Claim("b", ["a"])])
    study = make(metrics=["global/test_loss"], paper=paper)
    table = results({"a": [0.8, 0.7, 0.75], "b": [0.5, 0.41, 0.45]}).rename(columns={METRIC: "global/test_loss"})
    differences = paired_differences(table, study.metrics, "a")
    claims = list(tables(study, table, summarise(table, study.metrics), differences))[1][1]
    assert claims[1][1].startswith("holds: −0.2967")


def test_the_papers_mean():
    assert PAPER.mean("a", "all") == 0.8361
    assert math.isnan(PAPER.mean("c", "all"))


@pytest.mark.parametrize(
    ("paper", "message"),
    [
        (Paper("", "x", {}), "paper.metric: 'x' is not among the metrics"),
        (Paper("", METRIC, {"d": {}}), "paper: 'd' is not among the algorithms a, b, c"),
        (Paper("", METRIC, {"a": {"E": "1"}}), "paper: 'E' is not among the variants all"),
        (Paper("", METRIC, {}, [Claim("a", ["z"])]), "paper: 'z' is not among the algorithms"),
    ],
)
def test_names_must_be_those_of_the_study(paper, message):
    with pytest.raises(ConfigurationError, match=message):
        make(paper=paper)


def test_a_scaled_study_says_so_and_lies_elsewhere():
    study = make(scale=0.3, seeds=5, overrides={"trainer.max_rounds": 200})
    assert study.seed_list == [0, 1]
    assert study.name == "study_scale_0.3"
    assert study.run("all", study.methods[0], 0).settings["trainer.max_rounds"] == 60
    table = results({"a": [0.8, 0.7], "b": [0.9, 0.8], "c": [0.1, 0.1]})
    assert all("SCALED: 0.3 of the study's rounds and seeds" in text for text, _ in rows_of(table, study)[::2])
    with pytest.raises(ConfigurationError, match="scale: got 0"):
        make(scale=0.0)
    with pytest.raises(ConfigurationError, match=r"must say trainer\.max_rounds"):
        make(scale=0.5).run("all", study.methods[0], 0)
