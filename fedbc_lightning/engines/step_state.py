"""What a step may depend on beside weights and batch, described so that two descriptions differ where it changed."""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import types
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from fedbc_lightning.engines.recording import NotRecordableError

MAX_VALUES = 20_000
"""Looked at in one description."""
MAX_ARRAY_BYTES = 2**16
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format, np.generic, enum.Enum)
FIXED = (
    type, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ModuleType,
    logging.Logger,
)  # fmt: skip
LEFT_OUT = (set(vars(LightningModule())) - set(vars(nn.Module()))) | {
    "_parameters", "_flat_weight_refs", "log", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip
"""Attributes of a module that are Lightning's and torch's own affair, or not inputs of a step."""


class Description:
    """Describes a module's attributes, those of its classes, and the globals that its step names.

    Args:
        scratch: Buffers whose content is put back for each client: these are told by what they are alone.
        left_out: Modules that are not looked at, such as Metrics of the evaluation.
        step: Where its code starts. Another one than ``training_step`` is followed into the methods and functions that
            it names, and may meet no Metric.
    """

    def __init__(
        self, scratch: Collection[Tensor] = (), left_out: Collection[nn.Module] = (), step: str = "training_step"
    ) -> None:
        self._step, self._is_deep = step, step != "training_step"
        self._scratch = {id(buffer) for buffer in scratch}
        self._left_out = {id(child) for module in left_out for child in module.modules()}
        self._num_values, self._seen = 0, set[int]()

    def of(self, module: nn.Module) -> tuple:
        """The description.

        Raises:
            NotRecordableError: Something's changes cannot be seen, with its name.
        """
        self._num_values, self._seen = 0, set()
        parts: list[Any] = []
        for name, child in module.named_modules():
            if id(child) in self._left_out:
                continue
            own = {key: value for key, value in vars(child).items() if key not in LEFT_OUT}
            parts.append((id(child), self._fields(own, name)))
        for cls in type(module).__mro__:
            if cls in (LightningModule, nn.Module) or cls.__module__.partition(".")[0] in ("torch", "lightning"):
                break
            shared = {k: v for k, v in vars(cls).items() if not k.startswith(("__", "_abc_")) and self._is_state(v, k)}
            parts.append(self._fields(shared, cls.__name__))
        step: Any = getattr(type(module), self._step, None)
        if self._is_deep:
            for name in (self._step, "forward"):
                parts += self._code(getattr(type(module), name, None), type(module))
        elif getattr(step, "__code__", None) is not None:
            known = step.__globals__
            named = {k: known[k] for k in step.__code__.co_names if k in known and not _is_code(known[k])}
            parts += [self._fields(named, "global"), self.value(step, self._step)]
        return tuple(parts)

    def _code(self, function: Any, cls: type) -> list[Any]:
        """The globals that it names, what it has closed over, and those of the functions and methods that it names."""
        function = getattr(function, "__func__", getattr(function, "fget", function))
        function = inspect.unwrap(function) if callable(function) else None
        if not isinstance(function, types.FunctionType) or id(function) in self._seen:
            return []
        if function.__module__.partition(".")[0] in ("torch", "lightning", "torchmetrics", "numpy"):
            return []
        self._seen.add(id(function))
        names, known = _names(function.__code__), function.__globals__
        state = {k: known[k] for k in names if k in known and self._is_state(known[k], k)}
        state |= {
            name: cell.cell_contents
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            if self._is_state(cell.cell_contents, name)
        }
        parts: list[Any] = [self._fields(state, "global")]
        for name in names:
            parts += self._code(known.get(name), cls) + self._code(inspect.getattr_static(cls, name, None), cls)
        return parts

    def _is_state(self, value: Any, name: str) -> bool:
        if self._is_deep and isinstance(value, Metric):
            raise NotRecordableError(f"'{name}' is a torchmetrics Metric")
        return not _is_code(value)

    def value(self, value: Any, name: str) -> Any:
        """One value's.

        Raises:
            NotRecordableError: Its changes cannot be seen.
        """
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise NotRecordableError(f"'{name}' holds too much to look through in every round")
        if value is None or isinstance(value, PLAIN):
            return repr(value) if not isinstance(value, (str, bytes)) else value
        if isinstance(value, Tensor):
            is_versioned = id(value) not in self._scratch and not value.is_inference()
            return id(value), value._version if is_versioned else None
        if isinstance(value, (*FIXED, nn.Module)) or id(value) in self._seen:
            self._is_state(value, name)
            return id(value)
        self._seen.add(id(value))
        if isinstance(value, types.FunctionType):
            cells = value.__closure__ or ()
            return id(value), tuple(self.value(cell.cell_contents, name) for cell in cells)
        if isinstance(value, types.MethodType):
            return id(value.__func__), self.value(value.__self__, name)
        if isinstance(value, functools.partial):
            return self.value(value.func, name), self.value([*value.args, value.keywords], name)
        if isinstance(value, np.ndarray) and value.nbytes <= MAX_ARRAY_BYTES and value.dtype != object:
            return id(value), value.tobytes()
        if isinstance(value, dict):
            return tuple((self.value(k, name), self.value(v, f"{name}[{k!r}]")) for k, v in value.items())
        if isinstance(value, (list, tuple, deque)):
            return type(value), tuple(self.value(item, name) for item in value)
        if isinstance(value, (set, frozenset)):
            return tuple(sorted(repr(self.value(item, name)) for item in value))
        return self._object(value, name)

    def _object(self, value: Any, name: str) -> Any:
        slots = [s for cls in type(value).__mro__ for s in _slots(cls) if s not in ("__dict__", "__weakref__")]
        if type(value).__module__.partition(".")[0] in ("torch", "numpy", "random", "itertools") or not (
            slots or hasattr(value, "__dict__")
        ):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise NotRecordableError(f"'{name}' is a {kind}, whose changes cannot be seen")
        fields = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)} | getattr(value, "__dict__", {})
        return id(value), self._fields(fields, name)

    def _fields(self, fields: dict[str, Any], name: str) -> tuple:
        return tuple((key, self.value(value, f"{name}.{key}".lstrip("."))) for key, value in fields.items())


def _names(code: types.CodeType) -> list[str]:
    """Those of globals and attributes in a function and the functions inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*code.co_names, *(name for other in inner for name in _names(other))]


def _slots(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def _is_code(value: Any) -> bool:
    """Whether it is code rather than state: functions, classes, modules, properties."""
    return callable(value) or isinstance(value, (types.ModuleType, property, staticmethod, classmethod)) or (
        hasattr(type(value), "__get__")
    )  # fmt: skip
