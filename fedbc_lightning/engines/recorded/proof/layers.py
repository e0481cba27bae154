"""Calls torch's own layers as they are, and walks over a module's parts."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from fedbc_lightning.core import private_torch
from fedbc_lightning.engines.recorded.proof import known
from fedbc_lightning.engines.recorded.proof.attributes import Attributes
from fedbc_lightning.engines.recorded.proof.interpreter import Interpreter
from fedbc_lightning.engines.recorded.proof.objects import Objects
from fedbc_lightning.engines.recorded.proof.reads import MISSING, is_a, is_plain

WALKS = (
    nn.Module.parameters, nn.Module.named_parameters, nn.Module.buffers, nn.Module.named_buffers, nn.Module.children,
    nn.Module.named_children, nn.Module.modules, nn.Module.named_modules, nn.Module.get_submodule,
    nn.Module.get_parameter,
)  # fmt: skip
HOOKS = (*private_torch.CALL_HOOKS, *private_torch.CALL_HOOK_OPTIONS)
WITHOUT_WEIGHTS = frozenset(
    f"torch.nn.modules.{name}" for name in ("loss", "activation", "flatten", "pooling", "padding", "distance")
)
"""Modules of torch whose layers hold options only."""
WITH_WEIGHTS = (nn.PReLU, nn.MultiheadAttention)
"""The layers in them that hold more."""
NOT_READ = frozenset({
    *HOOKS, *private_torch.STATE_HOOKS, private_torch.FLAT_WEIGHT_REFERENCES, private_torch.BACKWARD_HOOK_KIND,
    "training",
})  # fmt: skip


class Layers:
    """Knows which modules may be called without looking into their ``forward``.

    Args:
        evaluator: Keeps what the layers read.
        attributes: Reads attributes.
        objects: Knows the objects that the step has made.
    """

    def __init__(self, evaluator: Interpreter, attributes: Attributes, objects: Objects) -> None:
        self._evaluator, self._reads = evaluator, evaluator.reads
        self._attributes, self._objects = attributes, objects

    def can_call(self, module: nn.Module) -> bool:
        """Return whether a module consists of torch's own layers alone; all that they hold counts as read.

        Raises:
            NotRecordableError: Hooks are registered on the module, or its class has a ``__call__`` of its own.
        """
        self._check_call(module)
        parts = list(module.modules())
        if not all(known.is_layer(type(part)) and self._is_plain_layer(part) for part in parts):
            return False
        for part in parts:
            self._check_call(part)
            self._read(part)
        return True

    def make(self, kind: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a layer of torch's without weights, such as a loss; return MISSING for all other classes."""
        if kind.__module__ not in WITHOUT_WEIGHTS or kind in WITH_WEIGHTS or not known.is_layer(kind):
            return MISSING
        for name in private_torch.GLOBAL_REGISTRATION_HOOKS:
            self._no_hooks(getattr(nn.modules.module, name))
        for value in (*args, *kwargs.values()):
            self._objects.check(value)
        for base in kind.__mro__[:-2]:
            self._reads.item(vars(base), base, "__init__")
        return self._objects.made(kind(*args, **kwargs))

    def walked(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of one of torch's walks over a module, such as ``parameters()``, or MISSING."""
        if function not in WALKS or not args or not is_a(args[0], nn.Module):
            return MISSING
        for child in args[0].modules():
            if any(getattr(type(child), walk.__name__) is not walk for walk in (*WALKS, private_torch.NAMED_MEMBERS)):
                self._evaluator.refuse(f"walks through a {type(child).__qualname__}, which does that by itself")
        for value in (*args[1:], *kwargs.values()):
            if not is_plain(value):
                self._evaluator.refuse(f"calls {function.__qualname__} with more than plain values")
        self._reads.tree(args[0])
        found = function(*args, **kwargs)
        return self._objects.walk(found) if is_a(found, types.GeneratorType) else found

    def _check_call(self, module: nn.Module) -> None:
        of_class = self._attributes.of_class
        if any(of_class(type(module), name) is not vars(nn.Module)[name] for name in private_torch.CALL_NAMES):
            self._evaluator.refuse(f"calls a {type(module).__qualname__}, which has a __call__ of its own")
        fields: Any = self._reads.fields(module)
        if self._reads.item(fields, fields, private_torch.COMPILED_CALL) not in (MISSING, None):
            self._evaluator.refuse(f"calls a {type(module).__qualname__} that is compiled")
        if self._reads.item(fields, fields, private_torch.CALL_NAMES[1]) is not MISSING:
            self._evaluator.refuse(f"calls a {type(module).__qualname__}, which has a _call_impl of its own")
        for name in HOOKS:
            self._no_hooks(vars(module)[name])
        for name in private_torch.GLOBAL_CALL_HOOKS:
            self._no_hooks(getattr(nn.modules.module, name))

    def _no_hooks(self, hooks: dict[Any, Any]) -> None:
        if hooks:
            self._evaluator.refuse("calls hooks that are registered on its layers")
        self._reads.length(hooks)

    def _is_plain_layer(self, layer: nn.Module) -> bool:
        """Return whether a layer holds plain values, tensors and objects of torch alone."""
        return all(name in NOT_READ or _is_readable(value) for name, value in vars(layer).items())

    def _read(self, layer: nn.Module) -> None:
        for base in type(layer).__mro__[:-2]:
            self._reads.length(vars(base), base)
            for name, value in vars(base).items():
                if is_a(value, types.FunctionType):
                    self._reads.item(vars(base), base, name)
        fields: Any = self._reads.fields(layer)
        self._reads.length(fields)
        not_read = NOT_READ - (set() if self._evaluator.is_own(layer) else {"training"})
        for name in fields:
            if name not in not_read:
                value = self._reads.item(fields, fields, name)
                if type(value) is list:
                    self._reads.sequence(value)
        for items in map(vars(layer).__getitem__, private_torch.REGISTRIES):
            for name in items:
                self._reads.item(items, items, name)
            self._reads.length(items)


def _is_readable(value: Any) -> bool:
    if type(value) in (list, tuple, set, dict):
        return all(map(_is_readable, value.values() if type(value) is dict else value))
    is_of_torch = is_plain(value) or id(value) in known.PURE
    return is_of_torch or is_a(value, (Tensor, torch.Generator, nn.Module))
