"""Finds the name under which a run logs the metric that a callback or scheduler monitors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor

from fedbc_lightning.core.metric_names import NUM_EVALUATED, Measured, measured, train_name
from fedbc_lightning.module.collector import plain_name


def is_of_evaluation(monitor: str) -> bool:
    """Return whether evaluation logs a metric, under its own name or the module's, such as ``val_loss``."""
    name = name_in_log(monitor, ())
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
    plain = plain_name(monitor)
    stage = monitor.removesuffix(plain)[:-1]
    if stage in ("", "train"):
        return train_name(plain) if stage else monitor
    # Lightning's callbacks monitor val_loss or test_acc. z is what such a callback is to judge, so it gets its value.
    return Measured(plain, split="test" if stage == "test" else "val").name


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
