"""From tables of rounds to numbers: the round that a run reports, means over seeds, and differences seed by seed."""

from __future__ import annotations

from typing import Literal

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
    The interval is Student's for the mean of n differences, t with n - 1 degrees of freedom; one seed has none.

    Args:
        results: Tidy table with one row per run; only finished runs count.
        metrics: Names of the metrics' columns.
        reference: Name of the algorithm that the others are compared with.
        confidence: Confidence level of the interval, in (0, 1).
    """
    finished = results[results["status"] == "finished"]
    rows = []
    for variant, runs in finished.groupby("variant", sort=False):
        # Pairs are taken seed by seed: what partition, initial model and sampled clients do to a number is most of its
        # variance over seeds, and it cancels in the difference.
        for metric in metrics:
            values = runs.pivot(index="seed", columns="algorithm", values=metric)
            others = [name for name in dict.fromkeys(runs["algorithm"]) if name != reference]
            for name in others if reference in values else ():
                differences = (values[name] - values[reference]).dropna()
                count, mean = len(differences), float(differences.mean())
                # Student's t, no normal quantile: studies have 3 to 5 seeds, where t is 4.3 to 2.8 in place of 1.96.
                reach = float(stats.t.ppf((1 + confidence) / 2, count - 1) * differences.sem())
                rows.append((variant, name, metric, count, mean, mean - reach, mean + reach))
    columns = ["variant", "algorithm", "metric", "num_pairs", "difference", "low", "high"]
    return pd.DataFrame(rows, columns=columns)
