"""Knows whether an optimizer's step runs no code but torch's own."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def steps_as_torch(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` and every function wrapped around it come from torch."""
    function: Any = optimizer.step
    while function is not None:
        function = getattr(function, "__func__", function)
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if home.partition(".")[0] != "torch":
            return False
        function = getattr(function, "__wrapped__", None)
    return True
