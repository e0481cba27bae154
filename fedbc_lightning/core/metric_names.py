"""The names of metrics in tables, in TensorBoard and for callbacks, such as ``accuracy/global``.

A metric that the user's module logs is a group of names: one for each model and each summary over clients. TensorBoard
shows a group as one block, and sorts the blocks by their names.
"""

from __future__ import annotations

import re
from typing import NamedTuple

GLOBAL = ("global",)
LOCAL = ("local", "local_weighted")
# How evenly the global model serves the clients: these are measured on test data only
EVEN = ("std", "worst10", "least_data", "most_data")
# z on clients that never train, as it is and after a few steps on each client's training data: means over clients
HELDOUT = ("heldout", "heldout_finetuned")
# How evenly z serves these clients: measured on test data only
EVEN_HELDOUT = tuple(f"{place}_{spread}" for place in HELDOUT for spread in ("std", "worst10"))
PLACES = (*GLOBAL, *LOCAL, *EVEN, *HELDOUT, *EVEN_HELDOUT)
TEST_ONLY = (*EVEN, *EVEN_HELDOUT)

TRAIN_LOSS = "train/loss"
EPSILON = "privacy/epsilon"
SIMULATED_SECONDS = "time/simulated_seconds"
NUM_EVALUATED = "num_clients/evaluated"

# Parts of a name: smaller values are better for a metric whose name contains one of these
PARTS = (
    "loss", "error", "perplexity", "entropy", "distance", "divergence", "brier", "rmse", "mse", "mae", "nll", "bpc",
)  # fmt: skip
# Whole words: smaller values are better for a metric whose name contains one of these as a word of its own
WORDS = frozenset({"bytes", "cer", "ece", "mape", "ppl", "seconds", "std", "wer"})

_ORDER = (GLOBAL, LOCAL, EVEN, HELDOUT, EVEN_HELDOUT)
_GROUPS = ("dual/", "staleness/", "privacy/", "comm/", "time/")


class Measured(NamedTuple):
    """What a name of the evaluation says.

    Attributes:
        metric: Name under which the module logs the metric, without the prefix of its stage.
        place: Model or summary over clients, one of :data:`PLACES`.
        split: Split of the data, ``"test"`` or ``"val"``.
    """

    metric: str
    place: str = "global"
    split: str = "test"

    @property
    def name(self) -> str:
        """The name in tables and logs.

        Example:
            >>> Measured("accuracy").name, Measured("accuracy", "worst10").name, Measured("loss", "local", "val").name
            ('accuracy/global', 'accuracy/worst10', 'loss/val_local')
            >>> Measured("accuracy", "heldout_finetuned").name
            'accuracy/heldout_finetuned'
        """
        return f"{self.metric}/{'val_' if self.split == 'val' else ''}{self.place}"


def measured(name: str) -> Measured | None:
    """Return what a name of the evaluation says; None for every other name.

    Example:
        >>> measured("accuracy/val_global")
        Measured(metric='accuracy', place='global', split='val')
        >>> measured("train/loss") is None
        True
    """
    metric, _, last = name.rpartition("/")
    place = last.removeprefix("val_")
    if not metric or place not in PLACES or (place != last and place in TEST_ONLY):
        return None
    return Measured(metric, place, "test" if place == last else "val")


def is_of_clients(name: str) -> bool:
    """Return whether a metric exists only where clients are evaluated one by one."""
    found = measured(name)
    return name == NUM_EVALUATED or (found is not None and found.place not in GLOBAL)


def is_of_validation(name: str) -> bool:
    """Return whether a metric is measured on validation data."""
    found = measured(name)
    return found is not None and found.split == "val"


def on_split(name: str, split: str) -> str:
    """Return the name of the same metric on another split; names that have none there stay as they are.

    Example:
        >>> on_split("accuracy/global", "val"), on_split("accuracy/std", "val"), on_split("train/loss", "val")
        ('accuracy/val_global', 'accuracy/std', 'train/loss')
    """
    found = measured(name)
    return name if found is None or found.place in TEST_ONLY else found._replace(split=split).name


def train_name(metric: str) -> str:
    """Return the name of what clients log in training, as a mean over them.

    Example:
        >>> train_name("accuracy")
        'train/accuracy'
    """
    return f"train/{metric}"


def order(name: str) -> int:
    """Return the group of a name in tables: training, global, own models, clients, held-out clients, then costs."""
    found = measured(name)
    if found is not None:
        return 1 + next(k for k, places in enumerate(_ORDER) if found.place in places)
    if name == NUM_EVALUATED:
        return 1 + _ORDER.index(EVEN)
    return next((1 + len(_ORDER) + k for k, group in enumerate(_GROUPS) if name.startswith(group)), 0)


def is_lower_better(metric: str) -> bool:
    """Return whether smaller values of a metric are better, judged by its name; letter case does not matter.

    Example:
        >>> is_lower_better("loss/global"), is_lower_better("RMSE/local"), is_lower_better("test_wer")
        (True, True, True)
        >>> is_lower_better("accuracy/local"), is_lower_better("test_power")
        (False, False)
    """
    name = metric.lower()
    return any(part in name for part in PARTS) or not WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name))
