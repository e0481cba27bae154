"""Under which name a run logs what callbacks and schedulers monitor."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fedbc_lightning.module.collector import plain_name

OF_VALIDATION = tuple(f"{stage}{separator}" for stage in ("val", "valid", "validation") for separator in "_/")
"""How names begin that modules log in ``validation_step``."""

OF_TEST = ("test_", "test/")
"""How names begin that modules log in ``test_step``."""

OF_EVALUATION = ("global/", "local/", "fairness/")
"""How the names begin that evaluation gives to the log of a run."""


def name_in_log(monitor: str, metrics: Collection[str]) -> str:
    """The name under which a run logs what a callback or scheduler monitors: that of the global model.

    Args:
        monitor: The name that a callback or scheduler was given.
        metrics: The names that are logged; one that is logged as it was given is meant as it was given.

    Example:
        >>> name_in_log("val_loss", ["global/val_loss"]), name_in_log("train_loss", ["train_loss"])
        ('global/val_loss', 'train_loss')
    """
    if monitor not in metrics:
        for split, prefixes in (("val", OF_VALIDATION), ("test", OF_TEST)):
            if monitor.startswith(prefixes):
                return f"global/{split}_{plain_name(monitor)}"
    return monitor


@contextmanager
def readable_as(monitor: str, name: str, metrics: dict[str, Tensor]) -> Iterator[None]:
    """Let a callback find under the name that it monitors what the run logs under ``name``."""
    if monitor == name:
        yield
        return
    metrics[monitor] = metrics[name]
    try:
        yield
    finally:
        metrics.pop(monitor, None)


def logged_only(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The metrics without what :func:`readable_as` added, which is the same tensor under a second name."""
    return {
        name: value
        for name, value in metrics.items()
        if name == name_in_log(name, ()) or metrics.get(name_in_log(name, ())) is not value
    }


def how_to_validate(datamodule: Any, *, is_of_run: bool = False) -> str:
    """What to do for validation data.

    Args:
        datamodule: The clients' data, which has none.
        is_of_run: Whether the models are those of a run, which was trained on all samples.
    """
    parameters = inspect.signature(type(datamodule)).parameters.values()
    is_argument = any(p.name == "val_fraction" or p.kind is p.VAR_KEYWORD for p in parameters)
    how = "data.val_fraction, e.g. 0.1"
    if not is_argument:
        how = f"val_fraction, e.g. 0.1, in {type(datamodule).__name__}.__init__: super().__init__(val_fraction=0.1)"
    if is_of_run:
        return f"the run was trained without any, and on every sample; use test, or train anew with {how}"
    return f"set {how}"
