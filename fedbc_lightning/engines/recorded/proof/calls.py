"""Calls functions: Python functions by their source, others if they are known to depend on their arguments alone."""

from __future__ import annotations

import ast
import functools
import itertools
import types
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fedbc_lightning.engines.recorded.proof import known
from fedbc_lightning.engines.recorded.proof.attributes import Attributes
from fedbc_lightning.engines.recorded.proof.frames import BATCH_INDEX, GENERATOR_FLAGS, Closure, Frame, bind
from fedbc_lightning.engines.recorded.proof.interpreter import Interpreter
from fedbc_lightning.engines.recorded.proof.layers import Layers
from fedbc_lightning.engines.recorded.proof.names import Names
from fedbc_lightning.engines.recorded.proof.objects import (
    ITERATOR,
    Objects,
    holds_tensor,
    is_named_tuple,
)
from fedbc_lightning.engines.recorded.proof.reads import MISSING, is_a, is_one_of, is_plain
from fedbc_lightning.engines.recorded.proof.source import definition_of, name_of
from fedbc_lightning.engines.recorded.proof.vouched import VOUCHED

TEXT = (str, bytes, int, float, complex, bool, tuple, torch.Size, range, frozenset)
READING = frozenset({
    "copy", "count", "index", "union", "intersection", "difference", "symmetric_difference", "isdisjoint", "issubset",
    "issuperset", "__contains__", "__len__",
})  # fmt: skip
"""Methods of lists, dicts and sets that leave them alone and look at all they hold."""
COMPARING = (sorted, min, max, set, frozenset)
"""They compare what they are given, which for tuples and keys begins with a look at whether it is the same object."""
ITERATORS = (itertools.islice, itertools.chain, itertools.product, itertools.pairwise, itertools.zip_longest)
NOT_THERE = object()
CHANGING = frozenset({
    "append", "extend", "insert", "pop", "clear", "reverse", "update", "setdefault", "add", "discard", "remove", "sort",
    "popitem", "move_to_end",
})  # fmt: skip
EFFECTS: dict[Any, str] = {
    print: "prints",
    open: "opens a file",
    input: "waits for input",
    next: "moves an iterator on",
}
"""What some of Python's functions do; all others that are not known are refused by their names."""


class Calls:
    """Calls functions for an evaluator.

    Args:
        evaluator: Evaluates Python functions.
        attributes: Reads attributes.
        objects: Knows the objects that the step has made.
        names: Reads names.
        log: The function behind ``self.log``, which is called as it is, with numbers and tensors.
    """

    def __init__(
        self, evaluator: Interpreter, attributes: Attributes, objects: Objects, names: Names, log: Any
    ) -> None:
        self._evaluator, self._reads = evaluator, evaluator.reads
        self._attributes, self._objects, self._names = attributes, objects, names
        self._log, self._layers, self._items = log, Layers(evaluator, attributes, objects), objects.items
        self._node = ast.Call(ast.Name("training_step"), [], [])
        self._special: dict[Any, Callable[..., Any]] = {
            getattr: self._getattr, hasattr: self._hasattr, isinstance: self._isinstance, issubclass: self._issubclass,
            len: self._objects.length, type: self._type, bool: self._objects.truth,
            callable: self._callable,
            iter: lambda value: self._objects.iterator(self._items(value)), next: self._next,
            super: super, list: lambda items=(): self._objects.made(self._items(items)),
            tuple: lambda items=(): tuple(self._items(items)),
            enumerate: lambda items, start=0: self._iterator(enumerate(self._items(items), start), items),
            zip: lambda *many, strict=False: self._iterator(zip(*map(self._items, many), strict=strict), *many),
            reversed: lambda items: self._iterator(self._items(items)[::-1], items),
            map: lambda f, *many: self._map(f, many), filter: self._filter,
            any: lambda items: any(map(self._objects.truth, self._items(items))),
            all: lambda items: all(map(self._objects.truth, self._items(items))),
            dict: self._dict, **{kind: functools.partial(self._chained, kind) for kind in ITERATORS},
        }  # fmt: skip

    def of_node(self, node: ast.Call) -> Any:
        """Return the value of a call."""
        evaluator = self._evaluator
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return self._super()
        function = evaluator.value(node.func)
        args = evaluator.values(node.args)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = evaluator.value(keyword.value)
            more = self._objects.mapping(value) if keyword.arg is None else {keyword.arg: value}
            if kwargs.keys() & more.keys():
                evaluator.refuse("gives an argument twice")
            kwargs |= more
        self._node = node
        return self.call(function, tuple(args), kwargs)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result."""
        if is_a(function, Closure):
            return self._closure(function, args, kwargs)
        if is_a(function, types.MethodType):
            return self._method(function, args, kwargs)
        if is_a(function, types.FunctionType):
            return self._function(function, args, kwargs)
        if is_a(function, types.BuiltinFunctionType):
            return self._builtin(function, args, kwargs)
        if is_a(function, type):
            return self._class(function, args, kwargs)
        if is_a(function, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            return self._descriptor(function, args, kwargs)
        if type(function) is functools.partial:
            self._reads.mapping(function.keywords)
            return self.call(function.func, (*function.args, *args), {**function.keywords, **kwargs})
        if id(function) in known.ARRAY_FUNCTIONS and not kwargs and len(args) == function.nin:
            return self._objects.made(self._native(function, args, kwargs))
        if is_a(function, nn.Module):
            return self._module(function, args, kwargs)
        method = self._attributes.special(function, "__call__")
        if is_a(method, types.MethodType):
            return self.call(method, args, kwargs)
        return self._refuse(function)

    # Python functions

    def _function(self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if vars(function).get(VOUCHED) is function:
            return function(*args, **kwargs)
        if id(function) in known.PURE:
            return self._native(function, args, kwargs)
        if function is nn.Module.__getattr__:
            return self._registered(*args)
        walked = self._layers.walked(function, args, kwargs)
        if walked is not MISSING:
            return walked
        code = function.__code__
        if code.co_flags & GENERATOR_FLAGS:
            self._evaluator.refuse(f"calls {name_of(function)}, which is asynchronous")
        node = definition_of(function)
        self._reads.attribute(function, "__code__")
        defaults = self._reads.attribute(function, "__defaults__") or ()
        keyword = self._reads.attribute(function, "__kwdefaults__") or {}
        bound = self._bound(code, args, kwargs, defaults, keyword)
        cells: dict[str, Any] = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for name, value in bound.items():
            if name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                self._objects.made(value)  # the tuple of *args and the dict of **kwargs are new with each call
        return self._evaluator.run(Frame(name_of(function), code, function.__globals__, cells, bound), node)

    def _bound(
        self, code: types.CodeType, args: tuple[Any, ...], kwargs: dict[str, Any], defaults: Any, keyword: Any
    ) -> dict[str, Any]:
        bound = bind(code, args, kwargs, defaults, keyword, code.co_name)
        for value in bound.values():
            self._objects.keep(value)
        return bound

    def _registered(self, module: nn.Module, name: str) -> Any:
        value = self._attributes.registered(module, name)
        if value is MISSING:
            message = f"'{type(module).__name__}' object has no attribute '{name}'"
            raise self._evaluator.known_error(AttributeError(message))
        return value

    def _closure(self, function: Closure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        code = function.code
        frame = function.frame()
        frame.locals = self._bound(code, args, kwargs, function.defaults, function.keyword_defaults)
        return self._evaluator.run(frame, function.node)

    def _method(self, method: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function, owner = method.__func__, method.__self__
        if is_a(owner, Metric):
            self._evaluator.refuse("updates a torchmetrics Metric")
        if function is self._log:
            return self._logged(method, args, kwargs)
        if is_a(owner, Tensor) and vars(Tensor).get(function.__name__) is function:
            return self._native(method, args, kwargs)
        return self.call(function, (owner, *args), kwargs)

    def _logged(self, log: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call ``self.log`` with numbers and tensors; the call is part of the result of the step."""
        for value in (*args, *kwargs.values()):
            if is_a(value, Metric):
                self._evaluator.refuse("logs a torchmetrics Metric")
            if value is not None and not callable(value):
                self._objects.check(value)
            elif callable(value) and id(value) not in known.PURE:
                self._evaluator.refuse(f"logs with the function {name_of(value)}")
        log(*args, **kwargs)

    # functions written in C

    def _builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function in self._special:
            return self._by_name(function, args, kwargs)
        if id(function) in known.PURE:
            return self._native(function, args, kwargs)
        owner = function.__self__
        name = function.__name__
        if is_a(owner, Tensor) and known.is_tensor_method(name):
            return self._native(function, args, kwargs)
        if is_one_of(type(owner), TEXT) or is_named_tuple(type(owner)):
            self._objects.check(owner)
            result = self._native(function, args, kwargs)
            return self._objects.made(result) if type(result) is list else result
        if is_a(owner, (list, dict, set)):
            return self._of_collection(function, owner, name, args, kwargs)
        return self._refuse(function)

    def _of_collection(self, function: Any, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict) -> Any:
        is_mapping = is_a(owner, dict)
        if is_mapping and name == "get":
            return self._objects.get(owner, *args)
        if is_mapping and name in ("items", "keys", "values"):
            self._objects.items(owner)
            return function()
        if is_mapping and name == "__getitem__":
            return self._objects.item(owner, *args)
        if name in CHANGING:
            if not self._objects.is_made(owner):
                what = self._node.func.value if isinstance(self._node.func, ast.Attribute) else self._node
                self._evaluator.refuse(f"changes `{ast.unparse(what)}`")
            if name == "update" and is_mapping:
                args = tuple(self._dict(a) for a in args)
            elif name in ("extend", "update"):
                args = tuple(self._items(a) for a in args)
            if name not in ("append", "extend", "insert", "update"):
                self._check(args, kwargs)
            if name in ("sort", "remove", "discard"):
                self._objects.check(owner)
                self._objects.check_identity(owner)
            if not is_a(owner, list):
                for key in [key for a in args for key in (self._items(a) if name == "update" else [a])]:
                    self._objects.check_key(key)
            self._objects.changed(owner)
            return function(*args, **kwargs)
        if name not in READING:
            self._refuse(function)
        for value in args:
            self._objects.check_identity(value)
        if name == "copy" and not self._objects.is_made(owner):
            _ = self._objects.mapping(owner) if is_mapping else self._items(owner)
            return self._objects.made(function())
        self._objects.check(owner)
        return self._objects.made(self._native(function, args, kwargs))

    def _descriptor(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a method called through its class, such as ``torch.Tensor.add(x, y)`` or ``dict.get(d, k)``."""
        if function is object.__init__ and self._objects.is_made(args[0]) and len(args) == 1:
            return None
        owner = function.__objclass__
        if args and (issubclass(owner, Tensor.__mro__[1]) or owner in (str, list, dict, set, tuple, OrderedDict)):
            return self.call(function.__get__(args[0], type(args[0])), args[1:], kwargs)
        return self._refuse(function)

    def _native(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that is written in C, or one of torch's, after a check that it runs no other code."""
        self._check(args, kwargs)
        self._check_values(function, args, kwargs)
        result = function(*args, **kwargs)
        return self._objects.made(result) if function in (sorted, list, dict, set) else result

    def _check_values(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse calls that look at values of tensors behind torch's dispatcher, or whose errors the step handles."""
        has_tensor = any(map(holds_tensor, (*args, *kwargs.values(), getattr(function, "__self__", None))))
        if has_tensor:
            self._evaluator.check_not_caught()
        is_of_numpy = id(function) in known.ARRAY_FUNCTIONS or (
            is_a(function, type) and issubclass(function, np.generic)
        )
        in_list = any(holds_tensor(value) and not is_a(value, Tensor) for value in args)
        if (is_of_numpy and has_tensor) or (function in known.FROM_DATA and in_list):
            self._evaluator.refuse("looks at the value of a tensor")
        if function is torch.tensor_split and any(is_a(value, Tensor) for value in args[1:]):
            self._evaluator.refuse("looks at the value of a tensor")
        if function in known.TEXT_FUNCTIONS or is_a(getattr(function, "__self__", None), (str, bytes)):
            for value in (*args, *kwargs.values()):
                self._objects.check_text(value)
        if getattr(function, "__module__", None) == "_operator":
            for value in args:
                self._objects.check_operand(value)
        if function in COMPARING or (function in known.COMPARISONS and not is_a(args[0], Tensor)):
            for value in args:
                self._objects.check_identity(value)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            self._objects.check(value)

    # classes

    def _class(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_one_of(cls, self._special):
            return self._by_name(cls, args, kwargs)
        if id(cls) in known.PURE or (issubclass(cls, np.generic) and cls.__module__ == "numpy"):
            return self._native(cls, args, kwargs)
        if is_one_of(cls, known.EXCEPTIONS) or is_named_tuple(cls):
            return cls(*args, **kwargs)
        if is_one_of(cls, known.CONTEXTS):
            self._check(args, kwargs)
            return self._objects.made(cls(*args, **kwargs))
        if issubclass(cls, nn.Module) and (layer := self._layers.make(cls, args, kwargs)) is not MISSING:
            return layer
        if (
            not is_one_of(type(cls), (type, ABCMeta))
            or issubclass(cls, (nn.Module, Tensor))
            or issubclass(cls, BaseException)
        ):
            self._refuse(cls)
        return self._instance(cls, args, kwargs)

    def _instance(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        of_class = self._attributes.of_class
        if of_class(cls, "__new__") is not vars(object)["__new__"] or of_class(cls, "__del__") is not MISSING:
            self._refuse(cls)
        init = of_class(cls, "__init__")
        if (
            "__dataclass_fields__" in vars(cls)
            and getattr(init, "__module__", None) == cls.__module__
            and (init.__code__.co_filename == "<string>")
        ):
            return self._data_instance(cls, args, kwargs)
        if not is_a(init, types.FunctionType) and (args or kwargs):
            self._refuse(cls)
        instance = self._objects.made(object.__new__(cls))
        if is_a(init, types.FunctionType):
            self.call(init, (instance, *args), kwargs)
        return instance

    def _data_instance(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an instance of a dataclass whose ``__init__`` does nothing but set attributes."""
        from dataclasses import MISSING as NO_FACTORY

        fields = vars(cls)["__dataclass_fields__"].values()
        has_code = hasattr(cls, "__post_init__") or cls.__setattr__ is not object.__setattr__
        has_code |= any(hasattr(vars(base).get(field.name), "__set__") for base in cls.__mro__ for field in fields)
        if has_code or any(field.default_factory is not NO_FACTORY for field in fields):
            self._refuse(cls)
        return self._objects.made(cls(*args, **kwargs))

    def _module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_a(module, Metric):
            self._evaluator.refuse("updates a torchmetrics Metric")
        if self._layers.can_call(module):
            self._check(args, kwargs)
            self._check_values(module, args, kwargs)
            return module(*args, **kwargs)
        forward = self._attributes.get(module, "forward")
        return self.call(forward, args, kwargs)

    def _by_name(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs and function is not dict and kwargs.keys() - {"strict", "start", "repeat", "fillvalue"}:
            self._refuse(function)
        if function is iter and len(args) != 1:
            self._refuse(function)
        for value in args:
            if function not in (isinstance, getattr, hasattr, len, type, callable, bool, super, list, tuple, dict):
                self._objects.check_new(value)
        return self._special[function](*args, **kwargs)

    # functions that mean a call, an attribute or an iteration

    def _super(self) -> super:
        frame = self._evaluator.frame
        first = frame.code.co_varnames[0]
        return super(self._names.value("__class__"), frame.locals[first])

    def _getattr(self, owner: Any, name: str, default: Any = MISSING) -> Any:
        if default is MISSING:
            return self._attributes.get(owner, name)
        try:
            return self._attributes.get(owner, name)
        except AttributeError as error:
            self._evaluator.check_known(error)
            return default

    def _hasattr(self, owner: Any, name: str) -> bool:
        return self._getattr(owner, name, NOT_THERE) is not NOT_THERE

    def _isinstance(self, value: Any, classes: Any) -> bool:
        if value is BATCH_INDEX or is_a(value, Closure):
            self._evaluator.refuse("uses batch_idx, or asks for the class of a function")
        own = self._attributes.of_class(type(value), "__class__")
        if own is not vars(object)["__class__"] and not is_a(value, Tensor):
            self._evaluator.refuse("asks for the class of an object that decides by itself what that is")
        for cls in _flat(classes):
            self._objects.check(cls)
            if type(cls) is ABCMeta:
                self._check_abstract(cls, value)
        if not self._objects.is_made(value):
            self._reads.kind(value)
        if is_a(value, nn.Parameter) and isinstance(value, classes) != isinstance(torch.empty(0), classes):
            self._evaluator.refuse("asks whether a tensor is a Parameter")
        return isinstance(value, classes)

    def _check_abstract(self, cls: type, value: Any) -> None:
        """Refuse abstract classes that decide by code of their own; keep what is registered with other ones."""
        hooks = [base for base in cls.__mro__[:-1] if "__subclasshook__" in vars(base)]
        if any(base.__module__ not in ("collections.abc", "typing", "abc") for base in hooks):
            self._refuse(cls)
        kind = type(value)
        self._reads.setting(lambda: issubclass(kind, cls))

    def _issubclass(self, value: Any, classes: Any) -> bool:
        self._isinstance(None, classes)
        return issubclass(value, classes)

    def _callable(self, value: Any) -> bool:
        if value is BATCH_INDEX:
            self._evaluator.refuse("uses batch_idx")
        return is_a(value, Closure) or callable(value)

    def _type(self, value: Any, *more: Any) -> type:
        if more or value is BATCH_INDEX or is_a(value, Closure):
            self._evaluator.refuse("makes a class, or uses batch_idx" if more else "asks for the class of its argument")
        if is_a(value, nn.Parameter):
            self._evaluator.refuse("asks whether a tensor is a Parameter")
        self._reads.kind(value)
        return type(value)

    def _next(self, iterator: Any, *default: Any) -> Any:
        lazy = self._objects.lazy_of(iterator)
        is_simple = lazy is None or (lazy.sources and not any(type(source) is ITERATOR for source in lazy.sources))
        if type(iterator) is not ITERATOR or not self._objects.is_made(iterator) or not is_simple:
            self._refuse(next)
        return next(iterator, *default)

    def _iterator(self, items: Any, *sources: Any, function: Any = None) -> Any:
        """Return an iterator over items that Python would make one by one from these sources, perhaps by a function."""
        frame = function.parent if is_a(function, Closure) else self._evaluator.frame
        names = function.code.co_freevars if is_a(function, Closure) else ()
        return self._objects.iterator(list(items), self._objects.lazy(frame, names, sources))

    def _chained(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an iterator of itertools, such as ``islice``, over items that are all made at once."""
        return self._iterator(kind(*[a if is_plain(a) else self._items(a) for a in args], **kwargs), *args)

    def _map(self, function: Any, many: tuple[Any, ...]) -> Any:
        rows = zip(*map(self._items, many), strict=False)
        return self._iterator(self._called_later(function, rows), *many, function=function)

    def _called_later(self, function: Any, rows: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Return the results of calls that Python would make later, when the results are asked for."""
        self._evaluator.num_generators += 1
        try:
            return [self.call(function, row, {}) for row in rows]
        finally:
            self._evaluator.num_generators -= 1

    def _filter(self, function: Any, items: Any) -> Any:
        truth, found = self._objects.truth, self._items(items)
        verdicts = found if function is None else self._called_later(function, [(item,) for item in found])
        kept = [item for item, verdict in zip(found, verdicts, strict=True) if truth(verdict)]
        return self._iterator(kept, items, function=function)

    def _dict(self, items: Any = (), /, **more: Any) -> dict[Any, Any]:
        if is_a(items, dict):
            return self._objects.made({**self._objects.mapping(items), **more})
        pairs = [self._items(pair) for pair in self._items(items)]
        for key, _ in pairs:
            self._objects.check_key(key)
        return self._objects.made({**dict(pairs), **more})

    def _refuse(self, function: Any) -> Any:
        try:
            effect = EFFECTS.get(function)
        except TypeError:
            effect = None
        if effect is None and is_a(getattr(function, "__self__", None), (types.ModuleType, type(None))):
            effect = f"calls {name_of(function)}, which is not known to be a function of its arguments"
        elif effect is None and is_a(function, types.BuiltinFunctionType):
            kind = type(function.__self__)
            effect = f"calls {kind.__module__}.{kind.__qualname__}.{function.__name__}, whose effects cannot be seen"
        elif effect is None:
            name = name_of(function) if is_a(function, type) else name_of(type(function))
            effect = f"calls {name}, which is not looked through"
        return self._evaluator.refuse(effect)


def _flat(classes: Any) -> list[Any]:
    """Return the classes of the second argument of ``isinstance``."""
    if is_a(classes, tuple):
        return [cls for inner in classes for cls in _flat(inner)]
    if is_a(classes, types.UnionType):
        return list(classes.__args__)
    return [classes]
