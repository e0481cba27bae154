"""Watches the objects that a step handles: it may change objects that it has made, and read all others."""

from __future__ import annotations

import ast
import enum
import operator
import types
from abc import ABCMeta
from collections import OrderedDict, namedtuple
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from fedbc_lightning.engines.recorded.proof import known
from fedbc_lightning.engines.recorded.proof.attributes import Attributes
from fedbc_lightning.engines.recorded.proof.frames import BATCH_INDEX, Frame
from fedbc_lightning.engines.recorded.proof.interpreter import Interpreter
from fedbc_lightning.engines.recorded.proof.reads import MISSING, is_a, is_one_of, is_plain

LISTS, MAPPINGS, SETS = (list, tuple), (dict, OrderedDict), (set, frozenset)
ITERATOR: type = type(iter([]))
MAX_ARRAY_BYTES, MAX_ITEMS = 2**16, 100_000
INDEXED = (list, tuple, str, bytes, range, torch.Size, Tensor, nn.Parameter, np.ndarray)
NAMED_TUPLE = {*vars(namedtuple("Pair", ())), "__orig_bases__", "__annotations__", "__annotate__", "__annotate_func__"}


RETURN_TYPES = tuple(kind for kind in vars(torch.return_types).values() if isinstance(kind, type))
"""What ``torch.max(x, 1)`` and the like give."""


@dataclass(frozen=True)
class Lazy:
    """Keeps what a generator reads.

    Attributes:
        frame: The function whose names the generator uses.
        values: Values of these names when the generator was made.
        sources: What the generator iterates over.
        num_changes: Number of changes of objects before the generator was made.
    """

    frame: Frame
    values: dict[str, Any]
    sources: tuple[Any, ...]
    num_changes: int


class Objects:
    """Decides what may be done to objects, and evaluates code of theirs that this runs.

    Args:
        evaluator: Evaluates that code.
        attributes: Reads attributes.

    Attributes:
        gone_through: Lists and dicts of the step's own that were iterated over, with their content at that time.
    """

    def __init__(self, evaluator: Interpreter, attributes: Attributes) -> None:
        self._evaluator, self._reads, self._attributes = evaluator, evaluator.reads, attributes
        self._made: dict[int, Any] = {}
        self._lazy: dict[int, Lazy] = {}
        self._kept: set[int] = set()
        self._walks: set[int] = set()
        self._changed: list[int] = []
        self.gone_through: list[tuple[Collection[Any], list[Any]]] = []

    # made inside

    def made(self, value: Any) -> Any:
        """Return a value after marking it as made by the step; nobody else may hold it."""
        if not is_plain(value):
            self._made[id(value)] = value
        return value

    def is_made(self, value: Any) -> bool:
        """Return whether the step has made the value."""
        return id(value) in self._made

    def iterator(self, items: list[Any], lazy: Lazy | None = None) -> Any:
        """Return an iterator that nobody else has.

        Args:
            items: The items of the iterator.
            lazy: What they are made from, if Python would make them one by one when they are asked for.
        """
        iterator = self.made(iter(items))
        if lazy is not None:
            self._lazy[id(iterator)] = lazy
        return iterator

    def walk(self, items: Iterable[Any]) -> Any:
        """Return an iterator over what was there before the step, which no step changes."""
        iterator = self.made(iter(list(items)))
        self._walks.add(id(iterator))
        return iterator

    def lazy(self, frame: Frame, names: Iterable[str], sources: tuple[Any, ...] = ()) -> Lazy:
        """Return what an iterator that is made now will read: names of a function, and what it iterates over."""
        values = {name: frame.locals[name] for name in names if name in frame.locals}
        return Lazy(frame, values, sources, len(self._changed))

    def lazy_of(self, iterator: Any) -> Lazy | None:
        """Return what the items of an iterator are made from, if Python would make them later."""
        return self._lazy.get(id(iterator))

    def check_lazy(self, lazy: Lazy | None) -> None:
        """Refuse if what a generator looks at has changed since it was made."""
        if lazy is None:
            return
        is_same = all(lazy.frame.locals.get(name) is value for name, value in lazy.values.items())
        if not is_same or _reachable([*lazy.values.values(), *lazy.sources]) & set(self._changed[lazy.num_changes :]):
            self._evaluator.refuse("changes what a generator looks at before the generator has ended")

    def keep(self, value: Any) -> None:
        """Give an iterator a name; a generator expression may then be used only once, and as a whole."""
        if type(value) is ITERATOR and self.is_made(value):
            lazy = self.lazy_of(value)
            if id(value) not in self._walks and (lazy is None or lazy.sources):
                self._evaluator.refuse("keeps an iterator instead of using it at once")
            self._kept.add(id(value))

    def check_new(self, value: Any) -> None:
        """Refuse to iterate step by step over an iterator that is not used where it is made."""
        if id(value) in self._kept:
            self._evaluator.refuse("goes through a generator that it has kept")

    def check_lists(self, lists: Iterable[tuple[Collection[Any], list[Any]]]) -> None:
        """Refuse if lists have changed while they were iterated over.

        Args:
            lists: Pairs of a list and its earlier content.
        """
        if any(len(now) != len(then) or any(map(operator.is_not, now, then)) for now, then in lists):
            self._evaluator.refuse("changes a list or dict while it goes through it")

    def changed(self, value: Any) -> None:
        """Keep in mind that an object of the step's own was changed."""
        self._changed.append(id(value))

    # handing values to code that is not evaluated

    def check(self, value: Any, seen: set[int] | None = None) -> None:
        """Read the whole of a value that code written in C will see, and refuse values with code of their own.

        Raises:
            NotRecordableError: The value may run code that is not evaluated.
        """
        kind = type(value)
        if is_plain(value) or is_one_of(kind, (Tensor, nn.Parameter, range, torch.finfo, torch.iinfo)):
            return
        seen = set() if seen is None else seen
        if id(value) in seen:
            return
        seen.add(id(value))
        self.check_lazy(self.lazy_of(value))
        if is_one_of(kind, LISTS) or is_one_of(kind, SETS) or is_named_tuple(kind):
            if not self.is_made(value) and not is_a(value, tuple):
                self._reads.sequence(value)
            for item in value:
                self.check(item, seen)
        elif is_one_of(kind, MAPPINGS):
            for key, item in self.mapping(value).items():
                self.check_key(key)
                self.check(item, seen)
        elif kind is slice:
            for part in (value.start, value.stop, value.step):
                self.check(part, seen)
        elif kind is np.ndarray:
            self._check_array(value)
        elif not (self.is_made(value) and kind is ITERATOR) and not self._is_known(value):
            self._refuse_use(value)

    def check_key(self, key: Any) -> None:
        """Refuse a key of a dict, or an item of a set, whose hash or comparison is code of the user's."""
        kind = type(key)
        self.check_identity(key)
        if is_plain(key) or is_known_class(key):
            return
        if is_one_of(kind, (tuple, frozenset)):
            for part in key:
                self.check_key(part)
        elif not (is_a(key, enum.Enum) and kind.__hash__ is enum.Enum.__hash__ and self.has_plain_equality(key)):
            self._refuse_use(key)

    def check_identity(self, value: Any) -> None:
        """Refuse to ask whether a tensor is the same object: a replayed or mapped step gets other tensors."""
        if holds_tensor(value):
            self._evaluator.refuse("asks whether a tensor is the same object")

    def check_text(self, value: Any) -> None:
        """Refuse to write anything but plain values into text."""
        parts = value if is_one_of(type(value), LISTS) else (value,)
        for part in parts:
            if not is_plain(part):
                self._evaluator.refuse(f"writes a {type(part).__qualname__} into a string")

    def check_operands(self, operation: ast.operator, left: Any, right: Any) -> None:
        """Check the operands of an operator as :meth:`check` does."""
        if isinstance(operation, ast.Mod) and is_one_of(type(left), (str, bytes)):
            self.check_text(right)
        for value in (left, right):
            self.check_operand(value)

    def check_operand(self, value: Any) -> None:
        """Check one operand of an operator as :meth:`check` does."""
        if is_a(value, Tensor):
            self._evaluator.check_not_caught()
        self.check(value)
        if is_a(value, type):
            self._refuse_use(value)

    def _is_known(self, value: Any) -> bool:
        return is_known_class(value) or is_one_of(type(value), known.VIEWS) or id(value) in known.PURE

    def _check_array(self, array: np.ndarray) -> None:
        if array.dtype == object or array.nbytes > MAX_ARRAY_BYTES:
            self._evaluator.refuse("uses a NumPy array that is too large to be compared, or holds objects")
        if not self.is_made(array):
            self._reads.array(array)

    def _refuse_use(self, value: Any) -> NoReturn:
        if value is BATCH_INDEX:
            self._evaluator.refuse("uses batch_idx")
        kind = type(value)
        self._evaluator.refuse(f"uses a {kind.__module__}.{kind.__qualname__} in a way that is not looked through")

    def has_plain_equality(self, value: Any) -> bool:
        """Return whether ``==`` and ``!=`` compare a value by identity."""
        return type(value).__eq__ is object.__eq__ and type(value).__ne__ is object.__ne__

    # reading

    def items(self, value: Any) -> list[Any]:
        """Return the items that an iteration over a value gives."""
        kind = type(value)
        if is_one_of(kind, (*LISTS, *SETS, torch.Size)) or is_named_tuple(kind):
            return self._items_of_collection(value)
        self.check_lazy(self.lazy_of(value))
        if kind is range and len(value) > MAX_ITEMS:
            self._evaluator.refuse("goes through a long range")
        if is_one_of(kind, (str, bytes, range, *known.VIEWS, Tensor, nn.Parameter)):
            return list(value)
        if kind is ITERATOR and self.is_made(value):
            return list(value)
        if is_a(value, dict) and self._is_as_in_dict(value, "__iter__"):
            found = list(self.mapping(value))
            if self.is_made(value):
                self.gone_through.append((value, found))
            return found
        method = self._attributes.special(value, "__iter__")
        if is_a(method, types.MethodType):
            return self.items(self._evaluator.call(method, (), {}))
        return self._evaluator.refuse(f"iterates over a {kind.__module__}.{kind.__qualname__}")

    def _items_of_collection(self, value: Any) -> list[Any]:
        found = list(value)
        if is_one_of(type(value), SETS) and not all(map(is_plain, found)):
            self._evaluator.refuse("goes through a set of objects, whose order is a matter of chance")
        if not is_a(value, tuple) and not self.is_made(value):
            self._reads.sequence(value)
        elif type(value) is list:
            self.gone_through.append((value, found))
        return found

    def mapping(self, value: Any) -> dict[Any, Any]:
        """Return all items of a dict."""
        if not is_a(value, dict) or not self._is_as_in_dict(value, "keys"):
            self._evaluator.refuse(f"takes all items of a {type(value).__qualname__}")
        for key in dict.keys(value):
            self.check_key(key)
        if not self.is_made(value):
            self._reads.mapping(value)
        return dict(dict.items(value))

    def item(self, owner: Any, key: Any) -> Any:
        """Return ``owner[key]``."""
        kind = type(owner)
        if is_a(owner, dict) and self._is_as_in_dict(owner, "__getitem__") and not hasattr(kind, "__missing__"):
            return self._item_of_dict(owner, key)
        if is_one_of(kind, INDEXED) or is_named_tuple(kind):
            self.check(key)
            if kind is list and not self.is_made(owner):
                self._reads.sequence(owner)
            elif kind is np.ndarray:
                self.check(owner)
            value = owner[key]
            return self.made(value) if kind is list and is_a(key, slice) else value
        method = self._attributes.special(owner, "__getitem__")
        if is_a(method, types.MethodType):
            return self._evaluator.call(method, (key,), {})
        return self._evaluator.refuse(f"takes an item of a {kind.__module__}.{kind.__qualname__}")

    def _item_of_dict(self, owner: dict[Any, Any], key: Any) -> Any:
        for each in (key, *dict.keys(owner)):
            self.check_key(each)
        value = dict.get(owner, key, MISSING) if self.is_made(owner) else self._reads.item(owner, owner, key)
        if value is MISSING:
            raise self._evaluator.known_error(KeyError(key))
        return value

    def get(self, owner: dict[Any, Any], key: Any, default: Any = None) -> Any:
        """Return ``owner.get(key, default)``."""
        try:
            return self._item_of_dict(owner, key)
        except KeyError:
            return default

    def contains(self, owner: Any, item: Any) -> bool:
        """Return ``item in owner``."""
        if is_a(owner, dict) and self._is_as_in_dict(owner, "__contains__"):
            return self.get(owner, item, MISSING) is not MISSING
        method = self._attributes.special(owner, "__contains__")
        if is_a(method, types.MethodType) and not is_a(owner, Tensor):
            return self.truth(self._evaluator.call(method, (item,), {}))
        if not self.has_plain_equality(item):
            self.check(item)
        self.check(owner)
        if not is_a(owner, Tensor):
            self.check_identity(item)
        return item in owner

    def length(self, owner: Any) -> Any:
        """Return ``len(owner)``."""
        method = self._attributes.special(owner, "__len__")
        if is_a(method, types.MethodType) and not is_a(owner, Tensor):
            return self._evaluator.call(method, (), {})
        if is_a(owner, (dict, list, set)):
            if not self.is_made(owner):
                self._reads.length(owner)
        elif not is_one_of(type(owner), (*known.VIEWS, tuple)):
            self.check(owner)
        return len(owner)

    def truth(self, value: Any) -> bool:
        """Return whether a value is true."""
        kind = type(value)
        if value is BATCH_INDEX:
            self._evaluator.refuse("uses batch_idx")
        if is_plain(value) or is_one_of(kind, (Tensor, nn.Parameter, types.FunctionType, types.MethodType)):
            return bool(value)
        if is_a(value, type):
            return True if is_known_class(value) else self._refuse_use(value)
        if is_one_of(kind, (*LISTS, *MAPPINGS, *SETS)):
            return bool(self.length(value))
        for name in ("__bool__", "__len__"):
            method = self._attributes.special(value, name)
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
            static = self._attributes.of_class(type(owner), target.attr)
            if static is MISSING or not hasattr(type(static), "__set__"):
                return
        what = f"changes the module (`{ast.unparse(target)}`)" if is_a(owner, nn.Module) else (
            f"changes `{ast.unparse(target)}`"
        )  # fmt: skip
        self._evaluator.refuse(what)

    def set_attribute(self, owner: Any, name: str, value: Any, target: ast.Attribute) -> None:
        """Do ``owner.name = value``."""
        self.check_attribute(owner, target)
        object.__setattr__(owner, name, value)
        self.changed(owner)

    def check_item(self, owner: Any, target: ast.Subscript) -> None:
        """Refuse to set an item of what the step has not made; items of tensors are checked as operations."""
        if is_a(owner, Tensor) or (self.is_made(owner) and is_one_of(type(owner), (list, dict, np.ndarray))):
            return
        self._evaluator.refuse(f"changes `{ast.unparse(target.value)}`")

    def set_item(self, owner: Any, key: Any, value: Any, target: ast.Subscript) -> None:
        """Do ``owner[key] = value``."""
        self.check_item(owner, target)
        self.check(key)
        if type(owner) is not dict and (type(owner) is not list or type(key) is slice):
            self.check(value)
        if type(owner) is dict:
            self.check_key(key)
        owner[key] = value
        self.changed(owner)

    def _is_as_in_dict(self, owner: dict[Any, Any], name: str) -> bool:
        return getattr(type(owner), name) in (getattr(dict, name), getattr(OrderedDict, name))


def holds_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, or a collection with one in it, at any depth that is looked through."""
    if is_one_of(type(value), (*MAPPINGS, *known.VIEWS)) or is_a(value, (list, tuple, set, frozenset)):
        return any(map(holds_tensor, dict.values(value) if is_a(value, dict) else value))
    return is_a(value, Tensor)


def is_known_class(value: Any) -> bool:
    """Return whether a value is a class that is hashed and compared as classes are."""
    return is_one_of(type(value), (*known.METACLASSES, ABCMeta, enum.EnumMeta))


def is_named_tuple(kind: type) -> bool:
    """Return whether a class is a ``namedtuple`` without operators and methods of its own, or one of torch's."""
    if is_one_of(kind, RETURN_TYPES):
        return True
    if kind.__bases__ != (tuple,) or not hasattr(kind, "_fields"):
        return False
    own = {name: value for name, value in vars(kind).items() if name not in kind._fields}
    functions = [getattr(f, "__func__", f) for f in own.values()]
    return not own.keys() - NAMED_TUPLE and all(
        f.__globals__.get("__name__", "").startswith(("collections", "namedtuple_"))
        for f in functions if isinstance(f, types.FunctionType)
    )  # fmt: skip


def _reachable(values: Iterable[Any]) -> set[int]:
    """Return the identities of all objects that can be reached from values through collections and attributes."""
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
