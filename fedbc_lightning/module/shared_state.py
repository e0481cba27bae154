"""Finds state of a module that is neither parameter nor buffer, which would leak from one client to the next."""

from __future__ import annotations

import pickle
import random
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric

from fedbc_lightning.core.private_torch import FLAT_WEIGHTS, writes_into
from fedbc_lightning.module.hooks import Hooks

# Largest number of values that are compared in a round; further ones are ignored
MAX_VALUES = 20_000
# Attributes that torch and Lightning give to every module, which are not compared
OWN = frozenset({*vars(LightningModule()), "log", "clip_gradients"})
REPLACED = " (another module now)"
# Random numbers that a module draws from a generator of its own depend on which clients were trained before.
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
BY_REFERENCE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
LIBRARIES = ("lightning", "pytorch_lightning", "fedbc_lightning", "torch", "torchmetrics", "builtins")


class SharedState:
    """Prints once which attributes of a module change while clients train, since all clients share them.

    It compares them before and after the clients of a round, so it costs the same for one client as for a million.

    Args:
        module: The user's module.
        hooks: The module's hooks; a module with an ``on_client_start`` is assumed to reset its state there.
    """

    def __init__(self, module: nn.Module, hooks: Hooks) -> None:
        self._module, self._hooks = module, hooks
        self._before: dict[str, Any] = {}
        self._has_reported = False

    def watch(self) -> None:
        """Describe the attributes before the first client of a round."""
        if not self._has_reported:
            self._before = self._described()

    def report(self) -> None:
        """Print which attributes have changed, after the last client of a round."""
        if self._has_reported:
            return
        now = self._described()
        changed = [name for name in {**self._before, **now} if self._before.get(name) != now.get(name)]
        inside = tuple(f"{name.removesuffix(REPLACED)}." for name in changed if name.endswith(REPLACED))
        changed = [name for name in changed if not name.startswith(inside)]
        self._before = {}
        if changed and not self._hooks.listens_itself("on_client_start"):
            self._has_reported = True
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            rank_zero_info(
                f"model: {', '.join(changed[:3])}{more} changed while clients trained and is neither parameter nor "
                "buffer: a client goes on with what the one before left there, no checkpoint holds it, and several "
                "processes give other numbers than one. Make it a buffer (trainer.buffers), or set it anew in "
                "on_client_start (said once)."
            )

    def _described(self) -> dict[str, Any]:
        """Return a description of each attribute by name, which differs if the attribute has changed."""
        own = (*self._module.modules(), *self._module.parameters(), *self._module.buffers())
        left, found = Budget(map(id, own)), {}
        for prefix, child in self._module.named_modules():
            if isinstance(child, Metric):
                continue
            for key, value in vars(child).items():
                if key not in OWN and not key.startswith(FLAT_WEIGHTS):
                    found[f"{prefix}.{key}".lstrip(".")] = left.describe(value)
            for key, part in child.named_children():
                found[f"{prefix}.{key}{REPLACED}".lstrip(".")] = id(part)
        return found


class Budget:
    """Describes values so that two descriptions differ where the values do, up to :data:`MAX_VALUES` of them.

    Args:
        own: The ids of the module's own parts, parameters and buffers, which are not described where they occur again.
    """

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._seen: set[int] = set()
        self._own = frozenset(own)

    def describe(self, value: Any) -> Any:
        """Return a description of a value, which is made of numbers, strings and tuples and equal for equal values."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return value
        is_known = id(value) in self._own or id(value) in self._seen
        if is_known or len(self._seen) > MAX_VALUES or isinstance(value, BY_REFERENCE):
            return id(value)
        self._seen.add(id(value))
        if isinstance(value, nn.Module):  # such as a module in a list, which torch does not know of
            return id(value), *(self.describe(tensor) for tensor in (*value.parameters(), *value.buffers()))
        if isinstance(value, Tensor):
            has_version = not value.is_inference()
            return id(value), writes_into(value) if has_version else 0, _sum(value)
        if isinstance(value, (np.ndarray, *GENERATORS)):
            return id(value), pickle.dumps(value) if getattr(value, "nbytes", 0) <= MAX_VALUES else None
        if isinstance(value, (set, frozenset)):
            return len(value), sum(hash(item) for item in value)
        if isinstance(value, dict):  # a copy of what it holds, since a thread of the user's may change it
            return tuple(self.describe(part) for part in [*value.keys(), *value.values()])
        if isinstance(value, (list, tuple, deque)):
            return tuple(self.describe(item) for item in list(value))
        # No container is made here, which would lend its id to the next one and so seem to be known.
        is_opaque = type(value).__module__.partition(".")[0] in LIBRARIES or not hasattr(value, "__dict__")
        return id(value) if is_opaque else (id(value), self.describe(vars(value)))


def _sum(tensor: Tensor) -> float:
    """Return the sum of a small tensor, since torch's version counter misses writes through ``.data``."""
    is_small = tensor.layout == torch.strided and tensor.device.type == "cpu" and 0 < tensor.numel() <= MAX_VALUES
    return float(tensor.detach().double().sum()) if is_small and not tensor.is_complex() else 0.0
