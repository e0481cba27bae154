"""Which round of a run is reported."""

from __future__ import annotations

from typing import Literal

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
        >>> criterion("best_on_validation", "global/test_accuracy"), criterion("last", "local/test_loss")
        ('global/val_accuracy', 'local/test_loss')
    """
    return metric.replace("/test_", "/val_") if report == "best_on_validation" else metric


def can_choose(report: Report, metric: str) -> bool:
    """Return whether a metric can choose the reported round: it must be measured on the data that ``report`` names.

    Example:
        >>> [can_choose("best_on_test", name) for name in ("global/test_f1", "fairness/f1_std", "train_loss")]
        [True, True, False]
        >>> [can_choose("best_on_validation", name) for name in ("global/test_f1", "global/val_f1", "fairness/f1_std")]
        [True, True, False]
    """
    if report == "best_on_validation":
        return "/val_" in criterion(report, metric)
    return "/test_" in metric or metric.startswith("fairness/")
