"""Describes values of any kind, so that a change of them shows."""

from __future__ import annotations

import hashlib
import pickle
import random
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from fedbc_lightning.core.private_torch import FLAT_WEIGHTS, writes_into

# Largest number of values that are compared in a round; further ones are ignored
MAX_VALUES = 20_000
# Depth to which the attributes of objects inside of objects are hashed; those of some lead back to the first one
MAX_DEPTH = 8
# Random numbers that a module draws from a generator of its own depend on which clients were trained before.
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
PLAIN = (int, float, complex, str, bytes, type(None))
BY_REFERENCE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
LIBRARIES = ("lightning", "pytorch_lightning", "fedbc_lightning", "torch", "torchmetrics", "builtins")
# Attributes that torch and Lightning give to every module, which are no values of the user's
OWN = frozenset({*vars(LightningModule()), *vars(LightningDataModule()), "log", "clip_gradients"})


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return an owner's attributes that hold values of the user's; of a class, those that are no code."""
    if isinstance(owner, type):
        found = vars(owner).items()
        return {k: v for k, v in found if not (k.startswith("__") or callable(v) or hasattr(v, "__get__"))}
    return {key: value for key, value in vars(owner).items() if key not in OWN and not key.startswith(FLAT_WEIGHTS)}


class Budget:
    """Describes values so that two descriptions differ where the values do, up to :data:`MAX_VALUES` of them.

    Args:
        own: The ids of the module's own parts, parameters and buffers, which are not described where they occur again.

    Attributes:
        is_partial: Whether some value may have changed without a difference in its description.
    """

    is_partial = False

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._seen: set[int] = set()
        self._own = frozenset(own)

    def describe(self, value: Any) -> Any:
        """Return a description of a value, which is made of numbers, strings and tuples and equal for equal values."""
        if isinstance(value, PLAIN):
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
        if isinstance(value, (np.ndarray, *GENERATORS)) and getattr(value, "nbytes", 0) <= MAX_VALUES:
            return id(value), pickle.dumps(value)
        if isinstance(value, (set, frozenset)):
            return len(value), sum(hash(item) for item in value)
        if isinstance(value, dict):  # a copy of what it holds, since a thread of the user's may change it
            return tuple(self.describe(part) for part in [*value, *value.values()])
        if isinstance(value, (list, tuple, deque)):
            return tuple(self.describe(item) for item in list(value))
        # No container is made here, which would lend its id to the next one and so seem to be known.
        has_attributes = hasattr(value, "__dict__")
        # What a hash of its own describes, such as a path or a date, does not change; iterators and large arrays do.
        self.is_partial |= not has_attributes and type(value).__hash__ in (None, object.__hash__)
        is_opaque = type(value).__module__.partition(".")[0] in LIBRARIES or not has_attributes
        return id(value) if is_opaque else (id(value), self.describe(vars(value)))


def content_hash(value: Any) -> str:
    """Return 16 digits of a hash of the numbers and texts that a value holds, equal in every process.

    Tensors and arrays count by dtype, shape and bytes; of other objects their attributes, or else their class.
    """
    found = hashlib.sha256()
    _hash_into(found, value, depth=0)
    return found.hexdigest()[:16]


def _hash_into(found: Any, value: Any, depth: int) -> None:
    if isinstance(value, Tensor) and value.layout == torch.strided:
        tensor = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # one element may have any stride
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, (np.ndarray, np.generic)):
        found.update(f"{value.dtype} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, PLAIN):
        found.update(f"{value!r} ".encode())
    elif isinstance(value, (list, tuple, dict)):
        parts = [*value.items()] if isinstance(value, dict) else value
        found.update(f"{type(value).__name__} of {len(parts)} ".encode())
        for part in parts:
            _hash_into(found, part, depth + 1)
    elif hasattr(value, "__array__"):  # such as an image
        _hash_into(found, np.asarray(value), depth)
    elif hasattr(value, "__dict__") and depth < MAX_DEPTH:
        _hash_into(found, (type(value).__qualname__, vars(value)), depth + 1)
    else:
        found.update(type(value).__qualname__.encode())


def _sum(tensor: Tensor) -> float:
    """Return the sum of a small tensor, since torch's version counter misses writes through ``.data``."""
    is_small = tensor.layout == torch.strided and tensor.device.type == "cpu" and 0 < tensor.numel() <= MAX_VALUES
    return float(tensor.detach().double().sum()) if is_small and not tensor.is_complex() else 0.0
