"""Means over seeds and paired differences, against independent computations."""

import re
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.conclusions import finding_sentences
from fedbc_lightning.studies.results import sampled_clients
from fedbc_lightning.studies.statistics import holm, paired_differences, summarise
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.tables import latex, markdown, summary_rows, tables, target_tables

METRIC = "accuracy/global"
TARGETS = {"base": "x.yaml", "algorithms": {"FedAvg": {}, "FedBC": {}}, "metrics": [METRIC, "loss/global"]}


def tables_of(study, summary, differences, readings=()):
    parts = {"summary": summary, "differences": differences, "readings": dict(readings), "curves": pd.DataFrame()}
    return tables(SimpleNamespace(study=study, **parts))


def results(values, status="finished"):
    """A tidy table of one variant: algorithm -> values by seed."""
    rows = [
        {"variant": "all", "algorithm": name, "seed": seed, "status": status, METRIC: value}
        for name, column in values.items() for seed, value in enumerate(column)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_intervals_are_those_of_a_paired_t_test():
    rng = np.random.default_rng(0)
    first, second = rng.random(5), rng.random(5)
    found = paired_differences(results({"a": first, "b": second}), [METRIC], "a", confidence=0.9)
    (row,) = found.to_dict("records")
    expected = stats.ttest_rel(second, first).confidence_interval(0.9)
    assert row["difference"] == pytest.approx(np.mean(second - first), abs=1e-15)
    assert (row["low"], row["high"]) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert row["p"] == row["p_holm"] == pytest.approx(stats.ttest_rel(second, first).pvalue, rel=1e-12)
    assert (row["algorithm"], row["num_pairs"]) == ("b", 5)
    assert paired_differences(results({"a": first}), [METRIC], "a").empty


def test_the_same_numbers_differ_by_exactly_nothing():
    values = [0.1, 0.7, 0.3]
    more = [value + 0.1 for value in values]  # by the same in each seed, up to the last digit: seeds repeat nothing
    same, shifted = paired_differences(results({"a": values, "b": values, "c": more}), [METRIC], "a").to_dict("records")
    assert (same["difference"], same["low"], same["high"]) == (0.0, 0.0, 0.0)
    assert np.isnan([same["p"], shifted["p"], shifted["p_holm"]]).all()


@pytest.mark.parametrize("seed", range(5))
def test_corrected_p_values_are_those_of_the_closed_test_of_bonferroni(seed):
    """Holm's method rejects what every set of comparisons that holds it rejects by its smallest p times its size."""
    p = np.random.default_rng(seed).beta(0.3, 1.0, 5)
    sets = [chosen for size in range(1, 6) for chosen in combinations(range(5), size)]
    expected = [max(min(1, len(one) * p[list(one)].min()) for one in sets if k in one) for k in range(5)]
    assert holm(pd.Series(p, list("edcba"))).to_list() == pytest.approx(expected)
    unfinished = holm(pd.Series([*p[:4], np.nan]))
    assert unfinished[:4].to_list() == pytest.approx(holm(pd.Series([*p[:4], 1.0]))[:4].to_list()), "it counts, too"


LUCK = {
    "normal": lambda rng, mean: rng.normal(mean, 0.02),
    "few test samples": lambda rng, mean: rng.binomial(50, mean) / 50,
    "heavy tails": lambda rng, mean: mean + 0.01 * rng.standard_t(2, len(mean)),
}


@pytest.mark.parametrize(("luck", "num_seeds"), [("normal", 3), ("few test samples", 3), ("heavy tails", 5)])
def test_of_methods_that_are_the_same_one_is_hardly_ever_called_better(luck, num_seeds):
    """Six methods that differ by luck alone, in two variants: about 5 % of studies at most name a winner anywhere."""
    rng, names, num_studies = np.random.default_rng(0), "abcdef", 1000
    study = Study("x.yaml", {name: {} for name in names}, variants={"E = 1": {}, "E = 3": {}}, metrics=[METRIC])
    rows = [(k, seed, variant, name) for k in range(num_studies) for seed in range(num_seeds)
            for variant in study.variants for name in names]  # fmt: skip
    table = pd.DataFrame(rows, columns=["study", "seed", "variant", "algorithm"]).assign(status="finished")
    seeds = rng.normal(0.8, 0.05, num_studies * num_seeds).clip(0, 1)  # what partition and model do to all methods
    table[METRIC] = LUCK[luck](rng, seeds.repeat(len(rows) // len(seeds)))
    apart = table.assign(variant=table["study"].astype(str) + table["variant"])  # 40 ms a call, for as many as you like
    found = paired_differences(apart, [METRIC], "a")["p"].groupby(np.arange(10 * num_studies) // 10)
    by_chance, corrected = found.min() <= 0.05, 10 * found.min() <= 0.05
    assert corrected.mean() <= 0.06
    assert by_chance.mean() > 0.15, "without a correction many do"
    for k in by_chance[by_chance & ~corrected].index[:2]:
        differences = paired_differences(table[table["study"] == k], [METRIC], "a")
        parts = tables_of(study, summarise(table[table["study"] == k], [METRIC]), differences)
        said = markdown("", parts, (), finding_sentences(study, differences))
        assert not re.search(r"better than|worse than|\*\*", said)
        assert said.count("not told apart from a in 2 of 2 variants") == 5


def test_a_failed_run_leaves_its_pair_out():
    table = results({"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 9.0]})
    table.loc[(table["algorithm"] == "b") & (table["seed"] == 2), "status"] = "failed"
    (row,) = paired_differences(table, [METRIC], "a").to_dict("records")
    assert (row["num_pairs"], row["difference"]) == (2, 1.5)
    summary = summarise(table, [METRIC]).set_index("algorithm")
    assert summary.loc["b", "num_seeds"] == 2
    assert summary.loc["a", "mean"] == 2.0
    assert summary.loc["a", "std"] == pytest.approx(np.std([1.0, 2.0, 3.0], ddof=1))


def test_tables_show_what_was_computed():
    study = Study("x.yaml", {"a": {"algorithm": "FedAvg"}, "b|c": {"algorithm": "FedBC"}}, seeds=2, metrics=[METRIC])
    table = results({"a": [0.5, 0.6], "b|c": [0.8, 0.7]})
    summary = summarise(table, [METRIC])
    assert summary_rows(study, summary, METRIC) == [["", "all"], ["a", "55.00 ± 7.07"], ["b|c", "75.00 ± 7.07"]]
    parts = list(tables_of(study, summary, paired_differences(table, [METRIC], "a")))
    text = markdown("study", parts, ["a note"])
    assert "|  | accuracy/global | difference to a |" in text
    assert "| b\\|c | 75.00 ± 7.07 | +20.00 [−107.06, +147.06], p 0.3 |" in text
    assert text.endswith("- a note\n")
    tex = latex(parts)
    assert r"b|c & 75.00 $\pm$ 7.07 & +20.00 [$-$107.06, +147.06], p 0.3 \\" in tex
    assert tex.count("\\begin{tabular}") == tex.count("\\end{tabular}") == 1
    assert "%" not in tex.replace("\\%", "").partition("\n")[2]


def test_several_variants_have_a_table_of_means_and_one_of_differences():
    study = Study("x.yaml", {"a": {}, "b": {}}, variants={"E = 1": {}, "E = 3": {}}, metrics=[METRIC], seeds=2)
    table = pd.concat([results({"a": [0.5, 0.6], "b": [0.8, 0.7]}).assign(variant=name) for name in study.variants])
    parts = list(tables_of(study, summarise(table, [METRIC]), paired_differences(table, [METRIC], "a")))
    assert [rows[0] for _, rows in parts] == [["", "E = 1", "E = 3"]] * 2
    assert [text.partition(";")[0] for text, _ in parts] == [
        "accuracy/global (global model z) in %", "accuracy/global in % points: difference to a of the same seed, mean "
        "[95 % interval of the mean, Student's t], p by Holm's correction for 2 comparisons, bold: better"
    ]  # fmt: skip


def found_in(values, metric=METRIC, **options):
    """The sentences of a study of a, the reference, and b: variant -> values of a and b by seed."""
    study = Study("x.yaml", {"a": {}, "b": {}}, metrics=[metric], seeds=3, **options)
    parts = [results({"a": a, "b": b}).assign(variant=name) for name, (a, b) in values.items()]
    table = pd.concat(parts).rename(columns={METRIC: metric})
    return finding_sentences(study, paired_differences(table, [metric], "a"))


UNEVEN = ([0.30, 0.31, 0.29], [0.25, 0.45, 0.24])
BETTER = ([0.30, 0.31, 0.29], [0.40, 0.42, 0.40])


def test_a_finding_has_numbers():
    (text,) = found_in({"all": UNEVEN})
    ending = "[95 % interval], p by Holm's correction for 1 comparison: b is"
    start = f"By accuracy/global (global model z) in % points {ending}"
    assert text == f"{start} not told apart from a (+1.33 [−25.92, +28.58], p 0.85)."
    assert found_in({"all": BETTER}) == [f"{start} better than a (+10.67 [+9.23, +12.10], p 0.00098)."]
    assert found_in({"all": BETTER[::-1]}) == [f"{start} worse than a (−10.67 [−12.10, −9.23], p 0.00098)."]
    (text,) = found_in({"all": BETTER}, "loss/global")
    loss = "By loss/global (global model z), lower is better"
    assert text == f"{loss} {ending} worse than a (+0.1067 [+0.0923, +0.1210], p 0.00098)."
    assert found_in({"all": ([0.3, None, None], [0.4, None, None])}) == [
        f"{start} not told apart from a (+10.00 (1 of 3 pairs))."
    ]


def test_a_finding_over_variants_says_in_how_many_and_by_how_much():
    names = {"E = 1": {}, "E = 3": {}, "E = 5": {}}
    (text,) = found_in({"E = 1": BETTER, "E = 3": UNEVEN, "E = 5": UNEVEN}, variants=names)
    assert text == (
        "By accuracy/global (global model z) in % points [95 % interval], p by Holm's correction for 3 comparisons: b "
        "is better than a in 1 of 3 variants (+10.67 [+9.23, +12.10], p 0.0029) and not told apart from a in 2 of 3 "
        "variants (+1.33)."
    )
    (text,) = found_in({"E = 3": BETTER, "E = 5": BETTER[::-1]}, variants=names)  # the other has not finished
    assert "better than a in 1 of 3 variants (+10.67 [+9.23, +12.10], p " in text
    assert "and worse than a in 1 of 3 variants (" in text


@pytest.mark.parametrize(("metric", "report"), [("loss/global", "best_on_test"), (METRIC, "last")])
def test_what_is_better_by_the_corrected_p_value_is_in_bold(metric, report):
    study = Study("x.yaml", {"a": {}, "b": {}, "c": {}}, metrics=[metric], report=report)
    table = results({"a": [0.30, 0.31, 0.29], "b": [0.20, 0.22, 0.20], "c": [0.40, 0.42, 0.40]})
    table = table.rename(columns={METRIC: metric})
    parts = list(tables_of(study, summarise(table, study.metrics), paired_differences(table, study.metrics, "a")))
    (_, *others), better = parts[0][1][1:], "bc"[metric == METRIC]
    assert {name for name, _, difference in others if difference.startswith("**")} == {better}
    assert ("best round on test data by loss/global, which flatters every method" in parts[0][0]) == (report != "last")


def test_a_mean_of_few_seeds_says_so():
    study = Study("x.yaml", {"a": {}, "b": {}}, metrics=[METRIC], seeds=2)
    table = results({"a": [0.5, 0.6], "b": [0.9, None]})
    rows = summary_rows(study, summarise(table, [METRIC]), METRIC)
    assert rows[1:] == [["a", "55.00 ± 7.07"], ["b", "90.00 (1 of 2 seeds)"]]


def curves() -> pd.DataFrame:
    """FedAvg gets to 80 % after 4 and 8 seconds, FedBC with one of two seeds after 3; the loss of both ends at 0.5."""
    rows = []
    for algorithm, seed, accuracies in (
        ("FedAvg", 0, (0.1, 0.5, 0.8, 0.7)),
        ("FedAvg", 1, (0.1, 0.3, 0.5, None, 0.9)),
        ("FedBC", 0, (0.1, 0.9, 0.95)),
        ("FedBC", 1, (0.1, 0.2, 0.3)),
    ):
        step = 2.0 if algorithm == "FedAvg" else 3.0
        rows += [("all", algorithm, seed, k, k * step, a, 1.0 if k < 2 else 0.5) for k, a in enumerate(accuracies)]
    names = ["variant", "algorithm", "seed", "rounds", "simulated_seconds", "accuracy/global", "loss/global"]
    return pd.DataFrame(rows, columns=names)


def test_costs_are_those_of_the_first_round_that_reached_the_value():
    targets = {"accuracy/global": [0.8, 0.99], "loss/global": [0.5]}
    study = Study(**TARGETS, seeds=2, axis="simulated_seconds", targets=targets)
    (text, accuracy), (_, loss) = target_tables(study, curves())
    assert text.startswith("simulated seconds until accuracy/global first reaches a value; median [least, most] over 2")
    assert accuracy == [
        ["", "≥ 80 %", "≥ 99 %"],
        ["FedAvg", "6 [4, 8]", "never"],
        ["FedBC", "never [3, never]; less in 1, more in 1 of 2 pairs", "never; less in 0, more in 0 of 2 pairs"],
    ]
    assert loss == [["", "≤ 0.5"], ["FedAvg", "4"], ["FedBC", "6; less in 0, more in 2 of 2 pairs"]]
    rounds = Study(**TARGETS, seeds=2, targets={"accuracy/global": [0.8]})
    assert next(iter(target_tables(rounds, curves())))[1][1] == ["FedAvg", "3 [2, 4]"]
    ((_, (*_, cell)),) = target_tables(rounds, curves().query("algorithm == 'FedAvg' or seed == 0"))
    assert cell == ["FedBC", "1 (1 of 2 seeds); less in 1, more in 0 of 1 pairs"]


def test_sampled_clients_are_not_compared_where_time_decides_them(tmp_path):
    (tmp_path / "clients.csv").write_text("round,client\n1,3\n1,0\n")
    assert sampled_clients(RunRecord(tmp_path)) == ((0, 3),)
    (tmp_path / "config.yaml").write_text("trainer: {system: {availability: {share: 0.5}}}\n")
    assert sampled_clients(RunRecord(tmp_path)) == ()
