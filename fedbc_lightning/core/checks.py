"""Checks of arguments that raise a :class:`ConfigurationError` naming the argument, the value and the fix.

An argument states its type, choices and bounds once, in its annotation; :func:`check_arguments` reads them there.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, wraps
from itertools import chain
from numbers import Integral, Real
from os import PathLike
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean, nearest
from fedbc_lightning.core.origin import is_ours, subclasses


@dataclass(frozen=True)
class Bound:
    """Condition on a number, as metadata of its annotation: ``steps: Annotated[int, at_least(1)] = 1``.

    jsonargparse 4.53 parses such an argument as its plain type and leaves the metadata to us.

    Attributes:
        allows: Returns whether a number meets the condition.
        text: The condition as it stands in a message behind the kind of number, such as ">= 1".
    """

    allows: Callable[[float], bool]
    text: str


def at_least(bound: float) -> Bound:
    """Allow numbers from ``bound`` on."""
    return Bound(lambda value: value >= bound, f">= {bound:g}")


def above(bound: float) -> Bound:
    """Allow numbers larger than ``bound``."""
    return Bound(lambda value: value > bound, f"> {bound:g}")


def below(bound: float) -> Bound:
    """Allow numbers smaller than ``bound``."""
    return Bound(lambda value: value < bound, f"< {bound:g}")


def within(low: float, high: float) -> Bound:
    """Allow numbers from ``low`` to ``high``, both included."""
    return Bound(lambda value: low <= value <= high, f"in [{low:g}, {high:g}]")


SHARE = Bound(lambda value: 0 <= value < 1, "in [0, 1)")
POSITIVE_SHARE = Bound(lambda value: 0 < value <= 1, "in (0, 1]")
FINITE = Bound(math.isfinite, "that is finite")

Count = Annotated[int, at_least(1)]
Number = Annotated[int, at_least(0)]
Fraction = Annotated[float, SHARE]
OpenFraction = Annotated[float, above(0), SHARE]
Share = Annotated[float, POSITIVE_SHARE]
NotNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, above(0)]
FiniteNotNegative = Annotated[NotNegative, FINITE]
FinitePositive = Annotated[Positive, FINITE]
UnitInterval = Annotated[float, within(0, 1)]

Made = TypeVar("Made", bound=type)
Method = TypeVar("Method", bound=Callable[..., Any])

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# Words for the types of numbers and texts; the types of objects are called by their names.
_WORDS = {int: "a whole number", float: "a number", str: "a text", types.NoneType: "null", Any: "anything"}


def check_arguments(owner: type, values: Mapping[str, Any], section: str) -> None:
    """Raise unless all arguments of a class have the types, choices and bounds that their annotations state.

    What an annotation says beyond these (the types of a callable, of the keys of a dict) is not checked.

    Args:
        owner: Class whose ``__init__`` has the arguments, or a dataclass.
        values: Values by name, such as ``locals()`` in ``__init__`` or ``vars(self)`` in ``__post_init__``; names
            that are no arguments are ignored.
        section: Section of the configuration in which the arguments stand, such as ``algorithm``.

    Raises:
        ConfigurationError: Some values are impossible; the message names all of them.
    """
    check_types(hints_of(owner), values, section)


class Checked:
    """Base of classes of this package that check the arguments of their ``__init__`` before it begins.

    What a derived class, also a user's, takes is checked where it arrives at a class of this package.

    Raises:
        ConfigurationError: Some values are impossible; the message names all of them.
        TypeError: Neither the class nor a base class has an argument.

    Attributes:
        section: Section of the configuration in which the arguments stand.

    Example:
        >>> class FedTwo(Checked):
        ...     section = "algorithm"
        ...     def __init__(self, rate: Annotated[float, above(0)], mode: Literal["a", "b"] | None = None) -> None:
        ...         self.rate = rate
        >>> FedTwo(rate=-1)
        Traceback (most recent call last):
        fedbc_lightning.core.errors.ConfigurationError: algorithm.rate: got -1; give a number > 0.
    """

    section: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the class's own ``__init__`` check what it is given."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and is_ours(cls):
            checked(cls.section)(cls)


def checked(section: str) -> Callable[[Made], Made]:
    """Let the ``__init__`` of a class, such as a dataclass, check its arguments as that of :class:`Checked` does."""

    def decorate(cls: Made) -> Made:
        init = cls.__init__  # type: ignore[misc]
        own = _names(init)
        has_others = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(init).parameters.values())

        @wraps(init)
        def with_checks(self: Any, *args: Any, **given: Any) -> None:
            bases = [_names(base.__init__) for base in type(self).__mro__]  # type: ignore[misc]
            known = dict.fromkeys(chain(*bases, own))  # somebody may have replaced an __init__
            _refuse_unknown(type(self).__name__, given, known, known if has_others else own)
            check_arguments(cls, dict(zip(own, args, strict=False)) | given, section)
            init(self, *args, **given)

        cls.__init__ = with_checks  # type: ignore[misc]
        return cls

    return decorate


def knows_arguments(method: Method) -> Method:
    """Let a method refuse an argument that it does not have as classes with checks do."""
    known = _names(method)

    @wraps(method)
    def with_check(self: Any, *args: Any, **given: Any) -> Any:
        _refuse_unknown(method.__name__, given, known, known)
        return method(self, *args, **given)

    return with_check  # type: ignore[return-value]


def _refuse_unknown(owner: str, given: Iterable[str], known: Iterable[str], taken: Iterable[str]) -> None:
    """Raise unless all names are taken; Python's own message may name a base class, and suggests nothing."""
    for name in given:
        if name not in taken:
            meant = did_you_mean(name, known, f"it takes {', '.join(known)}.")
            raise TypeError(f"{owner}() got an unexpected keyword argument '{name}'; {meant}")


def _names(call: Any) -> list[str]:
    """Return the names of the arguments of a method, without ``self`` and those of any name."""
    return [name for name, each in inspect.signature(call).parameters.items() if each.kind in _NAMED][1:]


def check_types(hints: Mapping[str, Any], values: Mapping[str, Any], section: str) -> None:
    """Raise unless all values that have an annotation are as it says; see :func:`check_arguments`."""
    wrong = [
        f"{section}.{name}: got {shown(value)}; give {_in_words(hints[name])}{_example(value, hints[name])}"
        for name, value in values.items()
        if name in hints and not _fits(value, hints[name])
    ]
    if wrong:
        raise ConfigurationError(" ".join(wrong))


def shown(value: Any) -> str:
    """Return a value for a message on one line: its representation, its middle left out if that is long, or its class.

    Example:
        >>> shown(0.5), shown(object()), shown(Bound)
        ('0.5', 'an object of object', 'the class Bound, not an object such as Bound(...)')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object such as {value.__name__}(...)"
    if type(value).__repr__ is object.__repr__:
        return f"an object of {type(value).__name__}"
    text = repr(value)
    # That of a network has a line for each layer, that of a large array a line for each row.
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= 100 else f"{text[:70]} ... {text[-25:]}"


@cache
def hints_of(owner: type) -> dict[str, Any]:
    """Return the types of a class's arguments; none where they are imported for type checkers alone."""
    constructor = owner if is_dataclass(owner) else owner.__init__  # type: ignore[misc]
    try:
        return get_type_hints(constructor, include_extras=True)
    except NameError:
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type; what is not understood of the type is taken to fit."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        bounds = [bound for bound in inner[1:] if isinstance(bound, Bound)]
        # None is in bounds: ``Annotated[int | None, at_least(1)]`` bounds the number alone.
        return _fits(value, inner[0]) and (value is None or all(bound.allows(value) for bound in bounds))
    if kind in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if kind is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if kind in (Iterable, Sequence, tuple):  # may be an array of millions, or loaders, which are asked for nothing yet
        return hasattr(type(value), "__iter__") and not isinstance(value, (str, type))
    if kind is Callable:
        return callable(value)
    if kind is dict:
        return isinstance(value, Mapping) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    # Numbers of NumPy count, since they come from tables and grids of settings; a bool is an int for Python alone.
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, (str, PathLike))
    is_plain_class = isinstance(hint, type) and hint is not Any and not getattr(hint, "_is_protocol", False)
    return isinstance(value, hint) if is_plain_class else True


def _in_words(hint: Any) -> str:
    """Return what an annotation allows, for a message."""
    *others, last = dict.fromkeys(_alternatives(hint))
    return f"{', '.join(others)} or {last}" if others else last


def _example(value: Any, hint: Any) -> str:
    """Return the end of a message: the class whose name a text is like, such as 'tensorboard' for a logger."""
    names = dict[str, str]()
    for base in _bases(hint):
        usable = sorted(cls.__name__ for cls in subclasses(base) if not inspect.isabstract(cls))
        names |= {name.removesuffix(base.__name__): name for name in usable if not name.startswith("_")}
    near = nearest(value, names, 0.85) if isinstance(value, str) else None
    return f"; did you mean {names[near]}(...)?" if near else "."


def _bases(hint: Any) -> list[type]:
    if isinstance(hint, type) and hint not in (bool, *_WORDS):
        return [hint]
    return [base for each in get_args(hint) for base in _bases(each)]


def _alternatives(hint: Any, bounds: str = "") -> list[str]:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        said = " and ".join(bound.text for bound in inner[1:] if isinstance(bound, Bound))
        said = said.replace(f" and {FINITE.text}", f" {FINITE.text}")
        return _alternatives(inner[0], f" {said}" if said else "")
    if kind in (Union, types.UnionType):
        return [words for each in inner for words in _alternatives(each, bounds)]
    if kind is Literal:
        return [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in inner]
    if kind in (list, dict):
        return [f"a {'list' if kind is list else 'mapping of quoted names'}, each item {_in_words(inner[-1])}"]
    if kind in (Iterable, Sequence, tuple, Callable):
        return ["a function" if kind is Callable else "a list"]
    if hint is bool:
        return ["true", "false"]
    words = _WORDS.get(hint) or f"an object of {getattr(hint, '__name__', hint)}"
    return [words + bounds if hint in (int, float) else words]
