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
    return any(kind is other for other in SCHEDULERS) and not has_own and _is_of_torch(kind.step, kind.get_lr)


def _is_of_torch(*functions: Any) -> bool:
    while functions:
        inner = [getattr(function, "__func__", function) for function in functions]
        homes = [getattr(f, "__globals__", {}).get("__name__", "") for f in inner]
        if any(home.partition(".")[0] != "torch" for home in homes):
            return False
        functions = tuple(f.__wrapped__ for f in inner if hasattr(f, "__wrapped__"))
    return True
