"""The names of metrics in tables, in TensorBoard and for callbacks, such as ``accuracy/global``.

A metric that the user's module logs is a group of names: one for each model and each summary over clients. TensorBoard
shows a group as one block, and sorts the blocks by their names.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

# Values of metrics by their names
Metrics = dict[str, float]


class Place(NamedTuple):
    """A model, or a summary over clients, of which a metric is measured.

    Attributes:
        group: Group in which its metrics stand in tables, from 1.
        words: What it is, for reports; empty where they do not show it.
        is_test_only: Whether it is measured on test data only.
    """

    group: int
    words: str = ""
    is_test_only: bool = False


# By the last part of a metric's name, in the order in which people want to read them
PLACES = {
    "global": Place(1, "global model z"),
    "local": Place(2, "clients' own models"),
    "local_weighted": Place(2),
    "local_worst10": Place(2, "own models of the worst tenth of the clients", is_test_only=True),
    # z on clients that never train, as it is and after a few steps on each client's training data: means over clients
    "heldout": Place(4, "z on held-out clients"),
    "heldout_finetuned": Place(4, "z on held-out clients, fine-tuned"),
    # How well and how evenly the global model serves the clients
    "mean": Place(3, "z, mean over the clients", is_test_only=True),
    "worst10": Place(3, "z on the worst tenth of the clients", is_test_only=True),
    "least_data": Place(3, "z on the client with least data", is_test_only=True),
    "most_data": Place(3, "z on the client with most data", is_test_only=True),
    "std": Place(3, is_test_only=True),
    # How many clients have the metric, if not all that are evaluated have it
    "num_clients": Place(3),
    "heldout_num_clients": Place(5),
    # How evenly z serves clients that never train
    "heldout_std": Place(5, is_test_only=True),
    "heldout_worst10": Place(5, is_test_only=True),
    "heldout_finetuned_std": Place(5, is_test_only=True),
    "heldout_finetuned_worst10": Place(5, is_test_only=True),
}
# Those that tell most about a run
KEY_PLACES = ("global", "local", "worst10", "heldout", "heldout_finetuned")

TRAIN_LOSS = "train/loss"
EPSILON = "privacy/epsilon"
SIMULATED_SECONDS = "time/simulated_seconds"
NUM_EVALUATED = "num_clients/evaluated"
# Why clients that a round asks for have no part in it, counted in num_clients/<reason>
MISSING = ("nonfinite", "absent", "straggler", "unavailable")

# Parts of a name: smaller values are better for a metric whose name contains one of these
PARTS = (
    "loss", "error", "perplexity", "entropy", "distance", "divergence", "brier", "rmse", "mse", "mae", "nll", "bpc",
)  # fmt: skip
# Whole words: smaller values are better for a metric whose name contains one of these as a word of its own
WORDS = frozenset({"bytes", "cer", "ece", "mape", "ppl", "seconds", "std", "wer"})

# What one client may log in a round or an evaluation: most names, and a name that a table can hold
MOST_NAMES = 10_000
NAME = re.compile(r"[^\x00\ud800-\udfff]{0,1000}")

# Groups of names in tables behind those of the evaluation
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
    def is_test_only(self) -> bool:
        """Whether there is no such metric on validation data."""
        return PLACES[self.place].is_test_only

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
    if not metric or place not in PLACES or (place != last and PLACES[place].is_test_only):
        return None
    return Measured(metric, place, "test" if place == last else "val")


def are_names(names: Collection[Any]) -> bool:
    r"""Return whether one client may log values under all of these names.

    Example:
        >>> are_names(["loss", "top 5\t(test)"]), are_names(["\0"]), are_names(["x" * 1001])
        (True, False, False)
    """
    return len(names) <= MOST_NAMES and all(map(NAME.fullmatch, names))


def is_of_clients(name: str) -> bool:
    """Return whether a metric exists only where clients are evaluated one by one."""
    found = measured(name)
    return name == NUM_EVALUATED or (found is not None and found.place != "global")


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
    return name if found is None or found.is_test_only else found._replace(split=split).name


def with_words(name: str) -> str:
    """Return the name of a metric, and the models that it is of, for reports.

    Example:
        >>> with_words("accuracy/local"), with_words("accuracy/std")
        ("accuracy/local (clients' own models)", 'accuracy/std')
    """
    words = PLACES[found.place].words if (found := measured(name)) else ""
    return f"{name} ({words})" if words else name


def has_value(name: str, value: float) -> bool:
    """Return whether a client has a metric: NaN may be the recall of a class that it lacks; a loss of NaN diverged.

    Example:
        >>> has_value("recall", 0.5), has_value("recall", float("nan")), has_value("loss", float("nan"))
        (True, False, True)
    """
    return value == value or is_lower_better(name)


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
        return PLACES[found.place].group
    if name == NUM_EVALUATED:
        return PLACES["worst10"].group
    return next((6 + k for k, group in enumerate(_GROUPS) if name.startswith(group)), 0)


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
