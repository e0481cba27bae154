"""Which round of a run is reported."""

from __future__ import annotations

from typing import Literal

from fedbc_lightning.core.metric_names import measured, on_split

Report = Literal["last", "mean_of_last_tenth", "best_on_validation", "best_on_test"]

ROUNDS: dict[Report, str] = {
    "last": "last round",
    "mean_of_last_tenth": "mean of last tenth",
    "best_on_test": "best round on test data",
    "best_on_validation": "best round on validation data",
}
"""Short names of the readings, for the rows of tables."""
OF_PAPERS: tuple[Report, ...] = ("last", "mean_of_last_tenth", "best_on_test")
"""The readings that a paper's numbers may be of, where it does not say."""


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
