"""Tell from a metric's name whether small or large values are better."""

from __future__ import annotations

import re

PARTS = (
    "loss", "error", "perplexity", "entropy", "distance", "divergence", "brier", "rmse", "mse", "mae", "nll", "bpc",
)  # fmt: skip
"""Parts of a name: smaller values are better for a metric whose name contains one of these."""
WORDS = frozenset({"bytes", "cer", "ece", "mape", "ppl", "seconds", "std", "wer"})
"""Whole words: smaller values are better for a metric whose name contains one of these as a word of its own."""


def is_lower_better(metric: str) -> bool:
    """Return whether smaller values of a metric are better, judged by its name; letter case does not matter.

    Example:
        >>> is_lower_better("global/test_loss"), is_lower_better("local/test_RMSE"), is_lower_better("test_wer")
        (True, True, True)
        >>> is_lower_better("local/test_accuracy"), is_lower_better("test_power")
        (False, False)
    """
    name = metric.lower()
    return any(part in name for part in PARTS) or not WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name))
