"""Knows which optimizers and schedulers run no code but torch's own between the steps of a client."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer, lr_scheduler

SCHEDULERS = (
    lr_scheduler.StepLR, lr_scheduler.MultiStepLR, lr_scheduler.ConstantLR, lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR, lr_scheduler.PolynomialLR, lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts, lr_scheduler.OneCycleLR,
)  # fmt: skip
"""Schedulers of torch that call no functions of the user and read no metrics."""


def steps_as_torch(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` and every function wrapped around it come from torch."""
    return _is_of_torch(optimizer.step)


def is_known_scheduler(scheduler: Any) -> bool:
    """Return whether a scheduler is one of torch's, unchanged, and runs no other code."""
    kind = type(scheduler)
    has_own = any(map(callable, vars(scheduler).values()))
    is_of_torch = _is_of_torch(kind.step) and _is_of_torch(kind.get_lr)
    return any(kind is other for other in SCHEDULERS) and not has_own and is_of_torch


def _is_of_torch(function: Any) -> bool:
    while function is not None:
        function = getattr(function, "__func__", function)
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if home.partition(".")[0] != "torch":
            return False
        function = getattr(function, "__wrapped__", None)
    return True
