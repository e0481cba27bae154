"""Keeps what a proven step has read apart from weights, batch and its own objects, and compares it later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbc_lightning.core.private_torch import REGISTRIES

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), torch.Size, torch.dtype,
    torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Exact types of values that cannot change and are compared by what they are worth."""
MISSING = object()


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Check the class as ``isinstance`` does, but by the type alone: ``__class__`` may be code of the user's."""
    return issubclass(type(value), kinds)


def is_one_of(kind: type, kinds: Iterable[type]) -> bool:
    """Return whether a class is one of these; ``in`` would ask a metaclass of the user's whether it is equal."""
    return any(kind is other for other in kinds)


def is_plain(value: Any) -> bool:
    """Return whether a value cannot change."""
    kind = type(value)
    if kind.__module__ == "numpy" and issubclass(kind, np.generic):
        return not issubclass(kind, np.void)  # fields of a np.void can be set
    return any(kind is other for other in PLAIN)


def is_same(now: Any, then: Any) -> bool:
    """Return whether a read gives what it gave before: the same object, or an equal plain value of the same type."""
    if now is then:
        return True
    return type(now) is type(then) and is_plain(now) and repr(now) == repr(then)


class Reads:
    """Keeps the reads of one proof; a step is the proven function as long as they give the same.

    Every object that a read gave is kept, so that no other object can take its place under the same identity.
    """

    def __init__(self) -> None:
        self._items: list[tuple[Callable[..., Any], Any, Any]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._tensors: list[tuple[Tensor, tuple[Any, ...]]] = []
        self._others: list[tuple[Callable[[], Any], Any]] = []
        self._contents: list[tuple[Callable[[], list[Any]], list[Any]]] = []
        self._known: dict[tuple[int, Any], Any] = {}  # keeps owners alive, and their identities taken

    def item(self, mapping: Mapping[Any, Any], owner: Any, key: Any) -> Any:
        """Read one item of a mapping, for instance an attribute; MISSING if there is none.

        Args:
            mapping: A dict, or the ``__dict__`` of a class.
            owner: The owner of the mapping, because the ``__dict__`` of a class is another object at each access.
            key: The key of the item.
        """
        get: Callable[..., Any] = partial(dict.get, mapping) if isinstance(mapping, dict) else mapping.get
        value = get(key, MISSING)
        if self._is_new(owner, ("item", key)):
            self._items.append((get, key, value))
            self._form(value)
        return value

    def cell(self, cell: CellType) -> Any:
        """Read what a function has closed over."""
        value = cell.cell_contents
        if self._is_new(cell, "cell"):
            self._others.append((lambda: cell.cell_contents, value))
            self._form(value)
        return value

    def attribute(self, owner: Any, name: str) -> Any:
        """Read an attribute that lies in no dict, such as a slot or a function's defaults."""
        value = getattr(owner, name, MISSING)
        if self._is_new(owner, ("attribute", name)):
            self._others.append((lambda: getattr(owner, name, MISSING), value))
            self._form(value)
        return value

    def setting(self, read: Callable[[], Any]) -> None:
        """Keep a global setting, such as torch's default dtype."""
        self._others.append((read, read()))

    def length(self, collection: Any, owner: Any = None) -> None:
        """Keep the number of items of a collection, for instance a dict of hooks; arguments as in :meth:`item`."""
        if self._is_new(collection if owner is None else owner, "length"):
            self._lengths.append((collection, len(collection)))

    def sequence(self, items: Any) -> None:
        """Keep all items of a list, a tuple or a set, in order."""
        self._content(items, list)

    def mapping(self, items: Any) -> None:
        """Keep all items of a dict, in order."""
        self._content(items, lambda now: [part for pair in dict.items(now) for part in pair])

    def array(self, array: np.ndarray) -> None:
        """Keep the content of a NumPy array."""
        if self._is_new(array, "array"):
            self._others.append((lambda: _bytes_of(array), _bytes_of(array)))

    def kind(self, owner: Any) -> None:
        """Keep the class of an object, and the bases of this class."""
        kind = type(owner)
        if self._is_new(owner, "kind"):
            self._others.append((lambda: type(owner), kind))
        if self._is_new(kind, "bases"):
            self._others.append((lambda: kind.__mro__, kind.__mro__))

    def fields(self, owner: Any) -> dict[str, Any] | None:
        """Read the dict of an object's attributes, or None; it may be replaced as a whole."""
        fields = getattr(owner, "__dict__", None)
        if fields is not None and self._is_new(owner, "fields"):
            self._others.append((lambda: vars(owner), fields))
        return fields

    def registered(self, module: nn.Module) -> list[dict[str, Any]]:
        """Read the dicts of a module's parameters, buffers and modules, which may be replaced as a whole."""
        fields: Any = self.fields(module)
        return [self.item(fields, fields, name) for name in REGISTRIES]

    def tree(self, module: nn.Module) -> None:
        """Keep which parameters, buffers and modules a module has, at every depth."""
        for child in module.modules():
            for items in self.registered(child):
                self.mapping(items)

    def hold(self) -> bool:
        """Return whether all reads give what they gave in the proof."""
        for get, key, then in self._items:
            now = get(key, MISSING)
            if now is not then and not is_same(now, then):
                return False
        for collection, length in self._lengths:
            if len(collection) != length:
                return False
        return (
            all(_form_of(tensor) == form for tensor, form in self._tensors)
            and all(is_same(read(), then) for read, then in self._others)
            and all(are_same(read(), then) for read, then in self._contents)
        )

    def sight(self) -> list[Any]:
        """Return what the reads give now."""
        items = [get(key, MISSING) for get, key, _ in self._items]
        contents = [part for read, _ in self._contents for part in (*read(), "end")]
        lengths = [len(collection) for collection, _ in self._lengths]
        return [*items, *contents, *lengths, *(read() for read, _ in self._others)]

    def _is_new(self, owner: Any, what: Any) -> bool:
        if (id(owner), what) in self._known:
            return False
        self._known[id(owner), what] = owner
        return True

    def _content(self, items: Any, listed: Callable[[Any], list[Any]]) -> None:
        if self._is_new(items, "content"):
            then = listed(items)
            self._contents.append((lambda: listed(items), then))
            for item in then:
                self._form(item)

    def _form(self, value: Any) -> None:
        """Keep what code can see of a tensor except for its values, which recorded operations read in every step."""
        if is_a(value, Tensor) and self._is_new(value, "form"):
            self._tensors.append((value, _form_of(value)))


def are_same(now: Any, then: Any) -> bool:
    """Return whether two lists of what was read are the same, one by one."""
    return len(now) == len(then) and all(map(is_same, now, then))


def _form_of(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad


def _bytes_of(array: np.ndarray) -> bytes:
    return repr((array.shape, array.strides, array.dtype)).encode() + array.tobytes()
