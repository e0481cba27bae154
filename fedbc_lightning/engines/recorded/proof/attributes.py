"""Reads attributes as Python finds them, and keeps every place that was looked at."""

from __future__ import annotations

import enum
import functools
import sys
import types
from abc import ABCMeta
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor, nn

from fedbc_lightning.engines.recorded.proof import known
from fedbc_lightning.engines.recorded.proof.frames import BatchIndex, Closure
from fedbc_lightning.engines.recorded.proof.interpreter import Interpreter
from fedbc_lightning.engines.recorded.proof.reads import MISSING, PLAIN, is_a, is_one_of, is_plain
from fedbc_lightning.module.trainer_proxy import ModuleTrainer

NATIVE: tuple[type, ...] = (
    *PLAIN, list, dict, tuple, set, frozenset, slice, range, OrderedDict, torch.finfo, torch.iinfo, deque,
    types.MappingProxyType, *known.VIEWS,
)  # fmt: skip
"""Exact types of Python and torch whose attributes are methods, or as unchangeable as the value."""
CONSTANT = frozenset({
    "max_rounds", "current_round", "datamodule", "callbacks", "is_global_zero", "global_rank", "local_rank",
    "world_size", "num_nodes", "num_devices", "precision", "default_root_dir", "log_dir", "accumulate_grad_batches",
    "gradient_clip_val", "gradient_clip_algorithm", "fast_dev_run", "barebones", "progress_bar_callback",
})  # fmt: skip
"""Names of ``self.trainer`` whose values are the same in all steps of a round."""
STAGES = frozenset({"training", "validating", "testing", "sanity_checking"})
"""Names of ``self.trainer`` whose values are the same in all steps of one kind; the engine sets them before."""
LOOKUPS = [
    vars(kind)["__getattribute__"]
    for kind in (
        object,
        dict,
        list,
        tuple,
        set,
        deque,
        types.SimpleNamespace,
        BaseException,
        OrderedDict,
        int,
        str,
        float,
    )
    if "__getattribute__" in vars(kind)
]
"""How Python finds attributes where a class does not decide otherwise."""
LIBRARIES = ("torch", "lightning", "builtins", "abc", "torchmetrics")
"""Packages whose classes have many bases, and do not lose one attribute while they get another."""
HEAP_TYPE = 1 << 9
"""The flag of classes whose attributes can be changed at all."""


FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, functools.partial,
)  # fmt: skip


def _is_of_library(cls: type) -> bool:
    """Return whether a class is the one that its package has under its name, which a class could claim wrongly."""
    home = sys.modules.get(cls.__module__)
    if cls.__module__.partition(".")[0] not in LIBRARIES or home is None:
        return False
    found: Any = home
    for part in cls.__qualname__.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found is cls


class Attributes:
    """Reads attributes for an evaluator.

    Args:
        evaluator: Calls what is found where reading an attribute means a call.
    """

    def __init__(self, evaluator: Interpreter) -> None:
        self._evaluator, self._reads = evaluator, evaluator.reads

    def get(self, owner: Any, name: str) -> Any:
        """Return the value of an attribute.

        Raises:
            AttributeError: There is no such attribute.
            NotRecordableError: It is not clear where the attribute comes from.
        """
        value = self._found(owner, name)
        if value is MISSING:
            message = f"'{type(owner).__name__}' object has no attribute '{name}'"
            raise self._evaluator.known_error(AttributeError(message))
        return value

    def of_class(self, cls: type, name: str) -> Any:
        """Return what a class and its bases hold under a name, or MISSING; changes of classes are seen."""
        for base in cls.__mro__:
            value = base.__dict__.get(name, MISSING)
            if value is MISSING and _is_of_library(base):
                self._reads.length(base.__dict__, base)  # stands for all names at once, of which there are many
            elif base.__flags__ & HEAP_TYPE:
                self._reads.item(base.__dict__, base, name)
            if value is not MISSING:
                return value
        return MISSING

    def special(self, owner: Any, name: str) -> Any:
        """Return a method of the owner's class, bound to the owner, as operators look it up, or MISSING."""
        static = self.of_class(type(owner), name)
        return MISSING if static is MISSING else self._bound(static, owner, type(owner), name)

    def _found(self, owner: Any, name: str) -> Any:
        kind = type(owner)
        if kind is BatchIndex or kind is Closure:
            self._evaluator.refuse("uses batch_idx" if kind is BatchIndex else "reads an attribute of a function")
        if kind is ModuleTrainer:
            return self._of_trainer(owner, name)
        if is_a(owner, Tensor):
            return self._of_tensor(owner, name)
        if is_a(owner, enum.Enum):
            return self._of_enum(owner, name)
        if is_one_of(kind, NATIVE) or is_plain(owner):
            return getattr(owner, name, MISSING)
        if kind is types.ModuleType:
            return self._of_package(owner, name)
        if kind is super:
            return self._of_super(owner, name)
        if is_a(owner, type):
            return self._of_type(owner, name)
        if is_one_of(kind, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
            return self._of_function(owner, name)
        return self._of_object(owner, name)

    def _of_enum(self, owner: enum.Enum, name: str) -> Any:
        own = vars(enum.Enum).get(name)
        if name in ("name", "value") and self.of_class(type(owner), name) is own:
            return self._reads.item(vars(owner), owner, f"_{name}_")
        return self._evaluator.refuse(f"reads {name} of an enumeration")

    def _of_trainer(self, trainer: ModuleTrainer, name: str) -> Any:
        values = vars(trainer)["_values"]
        if name in STAGES:
            return values[name]
        if name not in CONSTANT:
            what = "self.logger" if name in ("logger", "loggers") else f"self.trainer.{name}"
            self._evaluator.refuse(f"reads {what}")
        return self._reads.item(values, values, name)

    def _of_tensor(self, tensor: Tensor, name: str) -> Any:
        if type(tensor) not in (Tensor, nn.Parameter):
            self._evaluator.refuse(f"uses a {type(tensor).__qualname__}, a tensor of a class of its own")
        if name in known.TENSOR_PROPERTIES or known.is_tensor_method(name):
            return getattr(tensor, name)
        if not hasattr(Tensor, name):  # in a recording a fake tensor stands for this one, without its attributes
            self._evaluator.refuse(f"reads '{name}' of a tensor, an attribute that is not torch's")
        return self._evaluator.refuse(f"uses {name} of a tensor, which is more than its values")

    def _of_package(self, package: types.ModuleType, name: str) -> Any:
        value = self._reads.item(vars(package), package, name)
        if value is MISSING and "__getattr__" in vars(package):
            self._evaluator.refuse(f"reads {package.__name__}.{name}, which is made when it is asked for")
        return value

    def _of_super(self, owner: Any, name: str) -> Any:
        this, of, instance = owner.__thisclass__, owner.__self_class__, owner.__self__
        bases = of.__mro__[of.__mro__.index(this) + 1 :]
        for base in bases:
            value = self._reads.item(base.__dict__, base, name)
            if value is not MISSING:
                return self._bound(value, instance, of, name)
        return MISSING

    def _of_type(self, cls: type, name: str) -> Any:
        if type(cls) is enum.EnumMeta and name in cls._member_map_:
            members = cls._member_map_
            return self._reads.item(members, members, name)
        if name == "__class__":
            return type(cls)
        if self.of_class(type(cls), "__getattribute__") not in (type.__getattribute__, object.__getattribute__):
            self._evaluator.refuse(f"reads an attribute of {cls.__qualname__}, whose metaclass decides what it is")
        if name in ("__name__", "__qualname__", "__module__", "__mro__"):
            return self._reads.attribute(cls, name)
        self._check_metaclass(cls, name)
        static = self.of_class(cls, name)
        if type(static) is staticmethod:
            return static.__func__
        if type(static) is classmethod:
            return types.MethodType(static.__func__, cls)
        is_made_when_read = hasattr(type(static), "__get__") and not is_one_of(type(static), FUNCTIONS)
        if is_made_when_read or (static is MISSING and hasattr(type(cls), name)):
            self._evaluator.refuse(f"reads {cls.__qualname__}.{name}, which its metaclass or a property makes")
        return static

    def _check_metaclass(self, cls: type, name: str) -> None:
        meta = type(cls)
        if meta not in (*known.METACLASSES, ABCMeta):
            found = [other for other in ("__getattr__", name) if self.of_class(meta, other) is not MISSING]
            if found:
                self._evaluator.refuse(f"reads {cls.__qualname__}.{name}, which its metaclass may make")

    def _of_function(self, function: Any, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__", "__self__", "__func__", "__class__"):
            return getattr(function, name)
        if hasattr(type(function), name):
            self._evaluator.refuse(f"reads {name} of a function")
        fields = getattr(getattr(function, "__func__", function), "__dict__", {})
        return self._reads.item(fields, fields, name)

    def _of_object(self, owner: Any, name: str) -> Any:
        kind = type(owner)
        if self.of_class(kind, "__getattribute__") not in LOOKUPS:
            kind_name = f"{kind.__module__}.{kind.__qualname__}"
            self._evaluator.refuse(f"reads an attribute of a {kind_name}, which decides by itself what that is")
        if name == "__class__" and self.of_class(kind, name) is vars(object)[name]:
            return kind
        if name == "__dict__":
            self._evaluator.refuse("looks at all attributes of an object at once")
        is_made = self._evaluator.is_made(owner)
        if not is_made:
            self._reads.kind(owner)
        static = self.of_class(kind, name)
        if static is not MISSING and hasattr(type(static), "__set__"):  # goes before own attributes
            try:
                return self._bound(static, owner, kind, name)
            except AttributeError as error:  # Python then calls __getattr__
                self._evaluator.check_known(error)
                if self.of_class(kind, "__getattr__") not in (MISSING, nn.Module.__getattr__):
                    self._evaluator.refuse(f"reads '{name}', a property that is not there")
                raise
        fields = getattr(owner, "__dict__", None) if is_made else self._reads.fields(owner)
        if fields is not None and not is_made and not (name == "training" and self._evaluator.is_own(owner)):
            value = self._reads.item(fields, fields, name)
        else:  # made by the step, or `training`, which the engine sets before steps
            value = (fields or {}).get(name, MISSING)
        if value is not MISSING:
            return value
        if static is not MISSING:
            return self._bound(static, owner, kind, name)
        return self._by_getattr(owner, name)

    def _by_getattr(self, owner: Any, name: str) -> Any:
        fallback = self.of_class(type(owner), "__getattr__")
        if fallback is MISSING:
            return MISSING
        if fallback is not nn.Module.__getattr__:
            return self._evaluator.call(fallback, (owner, name), {})
        return self.registered(owner, name)

    def registered(self, owner: nn.Module, name: str) -> Any:
        """Return a parameter, buffer or child of a module, as ``nn.Module.__getattr__`` finds it, or MISSING."""
        for items in self._reads.registered(owner):
            value = self._reads.item(items, items, name)
            if value is not MISSING:
                return value
        return MISSING

    def _bound(self, static: Any, owner: Any, kind: type, name: str) -> Any:
        """Return what becomes of a class's attribute when it is read through an instance."""
        if is_a(static, types.FunctionType):
            return types.MethodType(static, owner)
        if type(static) is property:
            return self._evaluator.call(static.fget, (owner,), {})
        if type(static) is staticmethod:
            return static.__func__
        if type(static) is classmethod:
            return types.MethodType(static.__func__, kind)
        if type(static) is types.MemberDescriptorType:
            is_made = self._evaluator.is_made(owner)
            return getattr(owner, name, MISSING) if is_made else self._reads.attribute(owner, name)
        if type(static) is functools.partial or not hasattr(type(static), "__get__"):
            return static
        is_of_c = is_a(static, (types.MethodDescriptorType, types.WrapperDescriptorType))
        if is_of_c or type(static).__name__ == "_tuplegetter":
            return static.__get__(owner, kind)
        return self._evaluator.refuse(f"reads '{name}', which a {type(static).__qualname__} makes")
