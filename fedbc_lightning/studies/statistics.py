"""From tables of rounds to numbers: the round that a run reports, means over seeds, and differences seed by seed."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats

from fedbc_lightning.core.metric_names import measured, on_split

Report = Literal["last", "mean_of_last_tenth", "best_on_validation", "best_on_test"]

# Short names of the readings, for the rows of tables.
ROUNDS: dict[Report, str] = {
    "last": "last round",
    "mean_of_last_tenth": "mean of last tenth",
    "best_on_test": "best round on test data",
    "best_on_validation": "best round on validation data",
}

# Papers rarely say which of these their numbers are, so ours are shown at all three beside a paper's.
OF_PAPERS: tuple[Report, ...] = ("last", "mean_of_last_tenth", "best_on_test")

KEYS = ["variant", "algorithm", "seed"]

# Differences whose standard error is below this share of their mean are equal: metrics are rounded to float32.
LEAST_SPREAD = 1e-4


def criterion(report: Report, metric: str) -> str:
    """Return the metric by which the reported round is chosen.

    Example:
        >>> criterion("best_on_validation", "accuracy/global"), criterion("last", "loss/local")
        ('accuracy/val_global', 'loss/local')
    """
    return on_split(metric, "val") if report == "best_on_validation" else metric


def can_choose(report: Report, metric: str) -> bool:
    """Return whether a metric can choose the reported round: it must be measured on the data that ``report`` names.

    Example:
        >>> [can_choose("best_on_test", name) for name in ("f1/global", "f1/std", "train/loss")]
        [True, True, False]
        >>> [can_choose("best_on_validation", name) for name in ("f1/global", "f1/val_global", "f1/std")]
        [True, True, False]
    """
    found = measured(criterion(report, metric))
    return found is not None and found.split == ("val" if report == "best_on_validation" else "test")


def evaluated(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of rounds after which the models were evaluated, without the initial model's.

    A NaN in such a row means that the run has diverged.
    """
    columns = [name for name in metrics if (found := measured(name)) and not found.is_test_only]
    return metrics[metrics[columns].notna().any(axis=1) & (metrics["round"] > 0)] if columns else metrics


def reported_rows(metrics: pd.DataFrame, report: Report, chosen_by: str, *, is_lower_better: bool) -> pd.DataFrame:
    """Return the row of the reported round, or the rows of the rounds whose mean is reported.

    Args:
        metrics: Table ``metrics.csv`` of a run.
        report: Which round is read.
        chosen_by: Column that chooses the best round.
        is_lower_better: Whether small values of that column are good.
    """
    rows = evaluated(metrics)
    if report == "mean_of_last_tenth":
        return rows[10 * rows["round"] > 9 * rows["round"].iloc[-1]]
    values = rows[chosen_by].dropna() if report != "last" else pd.Series()
    if values.empty:
        return rows.tail(1)
    return rows.loc[[values.idxmin() if is_lower_better else values.idxmax()]]  # the first of equal values


def summarise(results: pd.DataFrame, metrics: list[str]) -> pd.DataFrame:
    """Compute number of seeds, mean and standard deviation (n - 1) per variant, algorithm and metric.

    Args:
        results: Tidy table with one row per run; only finished runs count.
        metrics: Names of the metrics' columns.
    """
    finished = results[results["status"] == "finished"]
    long = finished.melt(id_vars=KEYS, value_vars=metrics, var_name="metric", value_name="value").dropna()
    grouped = long.groupby(["variant", "algorithm", "metric"], sort=False)["value"]
    return grouped.agg(num_seeds="count", mean="mean", std="std").reset_index()


def paired_differences(
    results: pd.DataFrame, metrics: list[str], reference: str, confidence: float = 0.95
) -> pd.DataFrame:
    """Compute per variant, algorithm and metric the mean difference to the reference algorithm of the same seed.

    Runs of one seed share partition, initial model and sampled clients, so the effects of these on the numbers cancel.
    Interval and ``p`` are those of Student's test for the mean of n differences, t with n - 1 degrees of freedom, which
    takes the seeds' differences for independent draws of one normal distribution. One seed has neither. Where all seeds
    differ by the same amount, up to rounding, they do not show what another seed would give, and there is no ``p``.
    ``p_holm`` is that of the first metric, corrected by :func:`holm` for all algorithms and variants of the table.

    Args:
        results: Tidy table with one row per run; only finished runs count.
        metrics: Names of the metrics' columns, the most important first.
        reference: Name of the algorithm that the others are compared with.
        confidence: Confidence level of the interval, in (0, 1).
    """
    others = [name for name in dict.fromkeys(results["algorithm"]) if name != reference]
    by = ["variant", "metric", "algorithm"]
    every = pd.MultiIndex.from_product([dict.fromkeys(results["variant"]), metrics, others], names=by)
    long = results[results["status"] == "finished"].melt(KEYS, metrics, "metric")
    # Pairs are taken seed by seed: what partition, initial model and sampled clients do to a number is most of its
    # variance over seeds, and it cancels in the difference.
    pairs = long.merge(long[long["algorithm"] == reference], on=["variant", "metric", "seed"], suffixes=("", "_of"))
    differences = (pairs["value"] - pairs["value_of"]).groupby([pairs[key] for key in by])
    found = differences.agg(num_pairs="count", difference="mean", error="sem").reindex(every)
    mean, error, freedom = found["difference"], found.pop("error"), found["num_pairs"] - 1
    # Student's t, no normal quantile: studies have 3 to 5 seeds, where t is 4.3 to 2.8 in place of 1.96.
    reach = error * stats.t.ppf((1 + confidence) / 2, freedom)
    p = 2 * stats.t.sf((mean / error.where(error > LEAST_SPREAD * mean.abs())).abs(), freedom)
    found = found.assign(num_pairs=found["num_pairs"].fillna(0).astype(int), low=mean - reach, high=mean + reach, p=p)
    return found.assign(p_holm=holm(found["p"][found.index.get_level_values("metric") == metrics[0]])).reset_index()


def holm(p: pd.Series) -> pd.Series:
    """Correct p-values for the number of comparisons, by Holm's step-down method.

    The k-th smallest of m is multiplied by m - k + 1, and is at least as large as the ones before it. Whoever calls
    what is at most α then is wrong anywhere in at most a share α of all studies, if each p-value is right by itself;
    the comparisons may depend on each other, as those with one reference do.

    Args:
        p: The m p-values; NaN where a comparison has none (yet), which counts among them and stays NaN.

    References:
        Holm 1979, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6.

    Example:
        >>> holm(pd.Series([0.01, 0.04, None, 0.03])).tolist()
        [0.04, 0.09, nan, 0.09]
    """
    ordered = p.sort_values()  # NaN comes last
    return (ordered * np.arange(len(p), 0, -1)).cummax().clip(upper=1.0)[p.index]
