"""Which round of a run is reported, and its rows of ``metrics.csv``."""

from __future__ import annotations

from typing import Literal

import pandas as pd

from fedbc_lightning.core.metric_names import TEST_ONLY, measured, on_split

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
    columns = [name for name in metrics if (found := measured(name)) and found.place not in TEST_ONLY]
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
