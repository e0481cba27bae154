"""Finds the name under which a run logs the metric that a callback or scheduler monitors."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fedbc_lightning.core.metric_names import NUM_EVALUATED, Measured, measured, train_name
from fedbc_lightning.module.collector import plain_name

# Beginnings of the names that modules log in `validation_step`
OF_VALIDATION = tuple(f"{stage}{separator}" for stage in ("val", "valid", "validation") for separator in "_/")

# Beginnings of the names that modules log in `test_step`
OF_TEST = ("test_", "test/")

# Beginnings of the names that modules log in `training_step`
OF_TRAINING = ("train_", "train/")


def is_of_evaluation(name: str) -> bool:
    """Return whether a name is one under which evaluation logs."""
    return name == NUM_EVALUATED or measured(name) is not None


def name_in_log(monitor: str, metrics: Collection[str]) -> str:
    """Return the name under which a run logs a monitored metric of the global model.

    Args:
        monitor: Name that a callback or scheduler was given.
        metrics: Names that are logged; if ``monitor`` is among them, it is returned as it is.

    Example:
        >>> name_in_log("val_loss", ["loss/val_global"]), name_in_log("train_loss", ["train/loss"])
        ('loss/val_global', 'train/loss')
    """
    if monitor in metrics:
        return monitor
    # Lightning's callbacks monitor val_loss or test_acc. z is what such a callback is to judge, so it gets its value.
    for split, prefixes in (("val", OF_VALIDATION), ("test", OF_TEST)):
        if monitor.startswith(prefixes):
            return Measured(plain_name(monitor), split=split).name
    if monitor.startswith(OF_TRAINING):
        return train_name(plain_name(monitor))
    return monitor


@contextmanager
def readable_as(monitor: str, name: str, metrics: dict[str, Tensor]) -> Iterator[None]:
    """Let a callback find the metric that the run logs as ``name`` under the name that it monitors."""
    if monitor == name:
        yield
        return
    metrics[monitor] = metrics[name]
    try:
        yield
    finally:
        metrics.pop(monitor, None)


def logged_only(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the metrics without those that :func:`readable_as` added: the same tensors under other names."""
    return {
        name: value
        for name, value in metrics.items()
        if name == name_in_log(name, ()) or metrics.get(name_in_log(name, ())) is not value
    }


def how_to_validate(datamodule: Any, *, is_of_run: bool = False) -> str:
    """Return how the user can get validation data.

    Args:
        datamodule: The clients' data, which have no validation data.
        is_of_run: Whether the models come from a run that was trained on all samples.
    """
    parameters = inspect.signature(type(datamodule)).parameters.values()
    is_argument = any(p.name == "val_fraction" or p.kind is p.VAR_KEYWORD for p in parameters)
    how = "data.val_fraction, e.g. 0.1"
    if not is_argument:
        how = f"val_fraction, e.g. 0.1, in {type(datamodule).__name__}.__init__: super().__init__(val_fraction=0.1)"
    if is_of_run:
        return f"the run was trained without any, and on every sample; use test, or train anew with {how}"
    return f"set {how}"
