"""The objects that a step handles: it may change those that it made itself, and read all others."""

from __future__ import annotations

import ast
import enum
import types
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbc_lightning.engines.proof import known
from fedbc_lightning.engines.proof.frames import Frame
from fedbc_lightning.engines.proof.reads import MISSING, is_a, is_plain

if TYPE_CHECKING:
    from fedbc_lightning.engines.proof.evaluator import Evaluator

LISTS, MAPPINGS, SETS = (list, tuple), (dict, OrderedDict), (set, frozenset)
_DICTS: tuple[dict[str, int], ...] = ({}, OrderedDict())
VIEWS: tuple[type, ...] = tuple(type(view) for some in _DICTS for view in (some.items(), some.keys(), some.values()))
ITERATOR: type = type(iter([]))
MAX_ARRAY_BYTES = 2**16


class BatchIndex:
    """Stands for ``batch_idx``: it may be handed on, and nothing else."""


BATCH_INDEX = BatchIndex()


@dataclass(frozen=True)
class Lazy:
    """What a generator looks at.

    Attributes:
        frame: The function whose names it uses.
        values: Their values when it was made.
        sources: What it goes through.
        num_changes: How many changes there were until then.
    """

    frame: Frame
    values: dict[str, Any]
    sources: tuple[Any, ...]
    num_changes: int


class Objects:
    """What may be done to objects, and what code of theirs that would run.

    Args:
        evaluator: Evaluates that code.

    Attributes:
        gone_through: Lists of the step's own that were gone through, and what they held then.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator, self._reads = evaluator, evaluator.reads
        self._made: dict[int, Any] = {}
        self._lazy: dict[int, Lazy] = {}
        self._changed: list[int] = []
        self.gone_through: list[tuple[list[Any], list[Any]]] = []

    # made inside

    def made(self, value: Any) -> Any:
        """A value that came into being just now and that nobody else holds; itself."""
        if not is_plain(value):
            self._made[id(value)] = value
        return value

    def is_made(self, value: Any) -> bool:
        """Whether the value came into being inside the step."""
        return id(value) in self._made

    def iterator(self, items: list[Any], lazy: Lazy | None = None) -> Any:
        """An iterator that nobody else has.

        Args:
            items: What it gives.
            lazy: What they are made from, if Python would make them one by one when they are asked for.
        """
        iterator = self.made(iter(items))
        if lazy is not None:
            self._lazy[id(iterator)] = lazy
        return iterator

    def lazy(self, frame: Frame, names: Iterable[str], sources: tuple[Any, ...] = ()) -> Lazy:
        """What an iterator that is made now will look at: these names of a function, and what it goes through."""
        values = {name: frame.locals[name] for name in names if name in frame.locals}
        return Lazy(frame, values, sources, len(self._changed))

    def lazy_of(self, iterator: Any) -> Lazy | None:
        """What the items of an iterator are made from, if Python would make them later."""
        return self._lazy.get(id(iterator))

    def check_lazy(self, lazy: Lazy | None) -> None:
        """Refuse if what a generator looks at has changed since it was made."""
        if lazy is None:
            return
        is_same = all(lazy.frame.locals.get(name) is value for name, value in lazy.values.items())
        if not is_same or _reachable([*lazy.values.values(), *lazy.sources]) & set(self._changed[lazy.num_changes :]):
            self._evaluator.refuse("changes what a generator looks at before the generator has ended")

    def changed(self, value: Any) -> None:
        """Take down that an object of the step's own has been changed."""
        self._changed.append(id(value))

    # handing values to code that is not evaluated

    def check(self, value: Any) -> None:
        """Take down the whole of a value that code written in C is about to see, and refuse what has code of its own.

        Raises:
            NotRecordableError: It may run code that is not looked at.
        """
        kind = type(value)
        self.check_lazy(self.lazy_of(value))
        if is_plain(value) or kind in (Tensor, nn.Parameter, range, torch.finfo, torch.iinfo):
            return
        if kind in LISTS or kind in SETS or is_named_tuple(kind):
            if not self.is_made(value) and not is_a(value, tuple):
                self._reads.sequence(value)
            for item in value:
                self.check(item)
        elif kind in MAPPINGS:
            for pair in self.mapping(value).items():
                self.check(pair)
        elif kind is slice:
            self.check((value.start, value.stop, value.step))
        elif kind is np.ndarray:
            self._check_array(value)
        elif not (self.is_made(value) and kind is ITERATOR) and not self._is_known(value):
            self._refuse_use(value)

    def check_operand(self, value: Any) -> None:
        """As :meth:`check`, for the operands of an operator."""
        self.check(value)
        if is_a(value, (type, enum.Enum)):
            self._refuse_use(value)

    def _is_known(self, value: Any) -> bool:
        if is_a(value, type):
            return type(value) in (*known.METACLASSES, ABCMeta, enum.EnumMeta)
        if is_a(value, enum.Enum):
            return type(value).__eq__ in (object.__eq__, int.__eq__, str.__eq__)
        return type(value) in VIEWS or id(value) in known.PURE

    def _check_array(self, array: np.ndarray) -> None:
        if array.dtype == object or array.nbytes > MAX_ARRAY_BYTES:
            self._evaluator.refuse("uses a NumPy array that is too large to be compared, or holds objects")
        if not self.is_made(array):
            self._reads.array(array)

    def _refuse_use(self, value: Any) -> None:
        if value is BATCH_INDEX:
            self._evaluator.refuse("uses batch_idx")
        kind = type(value)
        self._evaluator.refuse(f"uses a {kind.__module__}.{kind.__qualname__} in a way that is not looked through")

    def has_plain_equality(self, value: Any) -> bool:
        """Whether ``==`` and ``!=`` compare it by identity."""
        return type(value).__eq__ is object.__eq__ and type(value).__ne__ is object.__ne__

    # reading

    def items(self, value: Any) -> list[Any]:
        """What iterating over a value gives."""
        kind = type(value)
        if kind in LISTS or kind in SETS or is_named_tuple(kind) or kind is torch.Size:
            return self._items_of_collection(value)
        self.check_lazy(self.lazy_of(value))
        if kind in (str, bytes, range, *VIEWS) or (kind is ITERATOR and self.is_made(value)):
            return list(value)
        if kind in (Tensor, nn.Parameter):
            return list(value)
        if is_a(value, dict) and self._is_as_in_dict(value, "__iter__"):
            return list(self.mapping(value))
        method = self._evaluator.attributes.special(value, "__iter__")
        if is_a(method, types.MethodType):
            return self.items(self._evaluator.call(method, (), {}))
        return self._evaluator.refuse(f"iterates over a {kind.__module__}.{kind.__qualname__}")

    def _items_of_collection(self, value: Any) -> list[Any]:
        found = list(value)
        if type(value) in SETS and not all(map(is_plain, found)):
            self._evaluator.refuse("goes through a set of objects, whose order is a matter of chance")
        if not is_a(value, tuple) and not self.is_made(value):
            self._reads.sequence(value)
        elif type(value) is list:
            self.gone_through.append((value, found))
        return found

    def mapping(self, value: Any) -> dict[Any, Any]:
        """All items of a dict."""
        if not is_a(value, dict) or not self._is_as_in_dict(value, "keys"):
            self._evaluator.refuse(f"takes all items of a {type(value).__qualname__}")
        if not self.is_made(value):
            self._reads.mapping(value)
        return dict(value)

    def item(self, owner: Any, key: Any) -> Any:
        """``owner[key]``."""
        kind = type(owner)
        if is_a(owner, dict) and self._is_as_in_dict(owner, "__getitem__") and not hasattr(kind, "__missing__"):
            return self._item_of_dict(owner, key)
        if kind in (list, tuple, str, bytes, range, torch.Size, Tensor, nn.Parameter, np.ndarray) or is_named_tuple(
            kind
        ):
            self.check(key)
            if kind is list and not self.is_made(owner):
                self._reads.sequence(owner)
            elif kind is np.ndarray:
                self.check(owner)
            value = owner[key]
            return self.made(value) if kind is list and is_a(key, slice) else value
        method = self._evaluator.attributes.special(owner, "__getitem__")
        if is_a(method, types.MethodType):
            return self._evaluator.call(method, (key,), {})
        return self._evaluator.refuse(f"takes an item of a {kind.__module__}.{kind.__qualname__}")

    def _item_of_dict(self, owner: dict[Any, Any], key: Any) -> Any:
        self.check(key)
        value = owner.get(key, MISSING) if self.is_made(owner) else self._reads.item(owner, owner, key)
        if value is MISSING:
            raise KeyError(key)
        return value

    def get(self, owner: dict[Any, Any], key: Any, default: Any = None) -> Any:
        """``owner.get(key, default)``."""
        try:
            return self._item_of_dict(owner, key)
        except KeyError:
            return default

    def contains(self, owner: Any, item: Any) -> bool:
        """``item in owner``."""
        if is_a(owner, dict) and self._is_as_in_dict(owner, "__contains__"):
            return self.get(owner, item, MISSING) is not MISSING
        method = self._evaluator.attributes.special(owner, "__contains__")
        if is_a(method, types.MethodType) and not is_a(owner, Tensor):
            return self.truth(self._evaluator.call(method, (item,), {}))
        if not self.has_plain_equality(item):
            self.check(item)
        self.check(owner)
        return item in owner

    def length(self, owner: Any) -> Any:
        """``len(owner)``."""
        method = self._evaluator.attributes.special(owner, "__len__")
        if is_a(method, types.MethodType) and not is_a(owner, Tensor):
            return self._evaluator.call(method, (), {})
        if is_a(owner, (dict, list, set)):
            self._reads.length(owner)
        elif type(owner) not in VIEWS:
            self.check(owner)
        return len(owner)

    def truth(self, value: Any) -> bool:
        """Whether a value is true."""
        if is_plain(value) or is_a(value, (Tensor, type, types.FunctionType, types.MethodType)):
            return bool(value)
        if is_a(value, (dict, list, set, tuple, frozenset)) and "__bool__" not in vars(type(value)):
            return bool(self.length(value))
        if value is BATCH_INDEX:
            self._evaluator.refuse("uses batch_idx")
        for name in ("__bool__", "__len__"):
            method = self._evaluator.attributes.special(value, name)
            if is_a(method, types.MethodType):
                return bool(self._evaluator.call(method, (), {}))
            if method is not MISSING:
                self.check(value)
                return bool(value)
        return True

    # changing

    def check_attribute(self, owner: Any, target: ast.Attribute) -> None:
        """Refuse to set an attribute of what the step has not made."""
        if self.is_made(owner) and type(owner).__setattr__ is object.__setattr__:
            static = self._evaluator.attributes.of_class(type(owner), target.attr)
            if static is MISSING or not hasattr(type(static), "__set__"):
                return
        what = f"changes the module (`{ast.unparse(target)}`)" if is_a(owner, nn.Module) else (
            f"changes `{ast.unparse(target)}`"
        )  # fmt: skip
        self._evaluator.refuse(what)

    def set_attribute(self, owner: Any, name: str, value: Any, target: ast.Attribute) -> None:
        """``owner.name = value``."""
        self.check_attribute(owner, target)
        object.__setattr__(owner, name, value)
        self.changed(owner)

    def check_item(self, owner: Any, target: ast.Subscript) -> None:
        """Refuse to set an item of what the step has not made; a tensor's are looked at as operations."""
        if is_a(owner, Tensor) or (self.is_made(owner) and type(owner) in (list, dict, np.ndarray)):
            return
        self._evaluator.refuse(f"changes `{ast.unparse(target.value)}`")

    def set_item(self, owner: Any, key: Any, value: Any, target: ast.Subscript) -> None:
        """``owner[key] = value``."""
        self.check_item(owner, target)
        self.check(key)
        if type(owner) is not dict and type(owner) is not list:
            self.check(value)
        owner[key] = value
        self.changed(owner)

    def _is_as_in_dict(self, owner: dict[Any, Any], name: str) -> bool:
        return getattr(type(owner), name) in (getattr(dict, name), getattr(OrderedDict, name))


def is_named_tuple(kind: type) -> bool:
    """Whether a class came from ``namedtuple``, with nothing added."""
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and "__iter__" not in vars(kind)


def _reachable(values: Iterable[Any]) -> set[int]:
    """The identities of all objects that can be reached from values through collections and attributes."""
    found: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in found or is_plain(value) or is_a(value, (Tensor, nn.Module, type)):
            continue
        found.add(id(value))
        if is_a(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif is_a(value, (list, tuple, set, frozenset)):
            waiting += value
        else:
            waiting += getattr(value, "__dict__", {}).values()
    return found
