"""Lightning's classes from either package, ``lightning.pytorch`` or ``pytorch_lightning``.

The two packages hold the same code as separate classes, so that an object of one is no ``isinstance`` of the other's
class. Importing ``pytorch_lightning`` takes a second; it is considered only if the user has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger

# Pairs of packages that hold the same classes twice
NAMES = (("lightning.pytorch", "pytorch_lightning"), ("lightning.fabric", "lightning_fabric"))


def both(cls: type) -> tuple[Any, ...]:
    """Return the class, and its twin of the same name in the other package if that has been imported.

    Example:
        >>> both(Callback)[0].__name__, both(dict)
        ('Callback', (<class 'dict'>,))
    """
    # Looked up in sys.modules at each call and never imported: the user may import the other package at any time.
    for package, twin in (*NAMES, *((twin, package) for package, twin in NAMES)):
        if f"{cls.__module__}.".startswith(f"{package}."):
            found = getattr(sys.modules.get(twin + cls.__module__.removeprefix(package)), cls.__name__, None)
            return (cls,) if found is None else (cls, found)
    return (cls,)


def own_base(instance: object, base: type) -> type:
    """Return ``base`` or its twin, whichever ``instance`` is derived from; ``base`` if it is derived from neither."""
    return next((kind for kind in both(base) if isinstance(instance, kind)), base)


def overrides(instance: object, name: str, base: type) -> bool:
    """Return whether ``instance`` overrides the method ``name`` of ``base``, or has a method that ``base`` lacks."""
    method, base = getattr(instance, name, None), own_base(instance, base)
    if method is None:
        return False
    return getattr(method, "__func__", method) is not getattr(base, name, None)


def listed(callbacks: Any) -> list[Any]:
    """Return callbacks as a list; one callback, several of them, or None may be given."""
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]


class _Either(type):
    """Metaclass of a class that stands for a class and its twin, in ``isinstance`` and in type hints."""

    original: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, both(cls.original))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, both(cls.original))

    def __subclasses__(cls) -> list[Any]:
        """Return the classes that the command line accepts by their short names, without the twin's own copies."""
        known, *other = both(cls.original)
        return [*known.__subclasses__(), *(child for twin in other for child in _of_users(twin))]


def _of_users(twin: type) -> Iterator[type]:
    """Yield the nearest subclasses of ``twin`` that its own package does not define, i.e. those of users."""
    child: type
    for child in twin.__subclasses__():
        if child.__module__.partition(".")[0] == twin.__module__.partition(".")[0]:
            yield from _of_users(child)
        else:
            yield child


def _either(original: type) -> Any:
    # Messages show the original's name, and pickle finds the class by the name that it has here.
    qualname = f"Any{original.__name__.removeprefix('Lightning')}"
    found = {"__module__": __name__, "__qualname__": qualname, "__doc__": original.__doc__, "original": original}
    return _Either(original.__name__, (), found)


if TYPE_CHECKING:
    AnyModule: TypeAlias = LightningModule
    AnyDataModule: TypeAlias = LightningDataModule
    AnyCallback: TypeAlias = Callback
    AnyLogger: TypeAlias = Logger
else:
    _all = LightningModule, LightningDataModule, Callback, Logger
    AnyModule, AnyDataModule, AnyCallback, AnyLogger = map(_either, _all)
