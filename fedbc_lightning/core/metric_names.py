"""What is good in a metric, by its name."""

from __future__ import annotations

import re

PARTS = (
    "loss", "error", "perplexity", "entropy", "distance", "divergence", "brier", "rmse", "mse", "mae", "nll", "bpc",
)  # fmt: skip
"""Anywhere in the name of a metric of which less is better."""
WORDS = frozenset({"bytes", "cer", "ece", "mape", "ppl", "seconds", "std", "wer"})
"""Whole words of such a name."""


def is_lower_better(metric: str) -> bool:
    """Whether small values of a metric are good, by its name, in small or large letters.

    Example:
        >>> is_lower_better("global/test_loss"), is_lower_better("local/test_RMSE"), is_lower_better("test_wer")
        (True, True, True)
        >>> is_lower_better("local/test_accuracy"), is_lower_better("test_power")
        (False, False)
    """
    name = metric.lower()
    return any(part in name for part in PARTS) or not WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name))
