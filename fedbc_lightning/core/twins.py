"""Lightning's classes under both of their names: ``lightning.pytorch`` and the package ``pytorch_lightning``.

The two hold the same code as separate classes, so that ``isinstance`` with one of them does not see objects of the
other. ``pytorch_lightning`` takes a second to import, and is looked at only where the user has imported it.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger

NAMES = (("lightning.pytorch", "pytorch_lightning"), ("lightning.fabric", "lightning_fabric"))
"""Packages and their twins."""


def both(cls: type) -> tuple[Any, ...]:
    """The class, and the one of the same name in the other package where that has been imported.

    Example:
        >>> both(Callback)[0].__name__, both(dict)
        ('Callback', (<class 'dict'>,))
    """
    for package, twin in (*NAMES, *((twin, package) for package, twin in NAMES)):
        if f"{cls.__module__}.".startswith(f"{package}."):
            found = getattr(sys.modules.get(twin + cls.__module__.removeprefix(package)), cls.__name__, None)
            return (cls,) if found is None else (cls, found)
    return (cls,)


def own_base(instance: object, base: type) -> type:
    """Return the one of :func:`both` of ``base`` that an object is derived from; ``base`` itself if it is neither."""
    return next((kind for kind in both(base) if isinstance(instance, kind)), base)


def overrides(instance: object, name: str, base: type) -> bool:
    """Whether ``instance`` has its own version of the method ``name`` of ``base`` (or has it and base does not)."""
    method, base = getattr(instance, name, None), own_base(instance, base)
    if method is None:
        return False
    return getattr(method, "__func__", method) is not getattr(base, name, None)


class _Either(type):
    """The type of a class that stands for both of its names, in ``isinstance`` and in type hints."""

    original: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, both(cls.original))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, both(cls.original))

    def __subclasses__(cls) -> list[Any]:
        """What a command line may be given by its short name, so without the twin's own copies."""
        known, *other = both(cls.original)
        return [*known.__subclasses__(), *(child for twin in other for child in _of_users(twin))]


def _of_users(twin: type) -> Iterator[type]:
    """The classes next below one of ``pytorch_lightning`` that are not that package's own."""
    child: type
    for child in twin.__subclasses__():
        if child.__module__.partition(".")[0] == twin.__module__.partition(".")[0]:
            yield from _of_users(child)
        else:
            yield child


def _named(name: str) -> Any:
    return globals()[name]


def _reduced(cls: _Either) -> tuple[Any, tuple[str]]:
    """How to pickle such a class, which pretends to have the name of another one, for processes that are spawned."""
    return _named, (f"Any{cls.original.__name__.removeprefix('Lightning')}",)


copyreg.pickle(_Either, _reduced)


def _either(original: type) -> Any:
    named = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return _Either(original.__name__, (), {**named, "original": original})


if TYPE_CHECKING:
    AnyModule: TypeAlias = LightningModule
    AnyDataModule: TypeAlias = LightningDataModule
    AnyCallback: TypeAlias = Callback
    AnyLogger: TypeAlias = Logger
else:
    AnyModule, AnyDataModule, AnyCallback, AnyLogger = map(
        _either, (LightningModule, LightningDataModule, Callback, Logger)
    )
