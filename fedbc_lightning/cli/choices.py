"""Lists the classes that can be chosen by name, and finds the base class that a nested key takes."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import BasePredictionWriter, Checkpoint
from lightning.pytorch.cli import SaveConfigCallback

from fedbc_lightning.algorithms.l2gd import Coin
from fedbc_lightning.core import private_cli
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.indexed import IndexedDataModule
from fedbc_lightning.local import Solver
from fedbc_lightning.server import (
    AugmentedMean,
    CenterConsensus,
    DynamicRegularization,
    FairStep,
    LargestClientStep,
    MeanMessage,
    ServerCallback,
    ServerOptimizer,
)
from fedbc_lightning.trainer.arguments import REFUSED_CALLBACKS
from fedbc_lightning.trainer.trainer import FederatedTrainer

NO_CHOICES = (Coin, ServerOptimizer, BasePredictionWriter, Checkpoint, FederatedDataModule, IndexedDataModule)
"""Classes that are not offered: bases of others, or parts that a method makes itself."""

UNWANTED: tuple[type, ...] = (SaveConfigCallback, *REFUSED_CALLBACKS)
"""Classes that are not offered, together with all classes derived from them."""

NEED_CLIENT_HALF = (AugmentedMean, CenterConsensus, DynamicRegularization, FairStep, LargestClientStep, MeanMessage)
"""Server parts that are not offered, because they need what the clients of their own method keep or send."""


def subclasses(base: type) -> set[type]:
    """Return all imported classes that are derived from ``base``, directly or not."""
    below: set[type] = set()
    children: list[type] = base.__subclasses__()
    for child in children:
        below |= {child, *subclasses(child)}
    return below


def choices(base: type) -> list[type]:
    """Return the classes derived from ``base`` that a config can name, those of this package first, sorted by name.

    Example:
        >>> [cls.__name__ for cls in choices(Solver) if is_ours(cls)]
        ['Armijo', 'ModelAgnostic', 'MoreauEnvelope']
    """
    found = [
        cls
        for cls in subclasses(base)
        if not inspect.isabstract(cls) and not cls.__name__.startswith("_") and cls not in NO_CHOICES
        if not issubclass(cls, UNWANTED) and is_for_yaml(cls)
        if not cls.__module__.startswith("fedbc_lightning.papers.")  # needed by one paper's study, which names the path
    ]
    return sorted(found, key=lambda cls: (not is_ours(cls), cls.__name__))


def is_for_yaml(cls: type) -> bool:
    """Return whether a config can hold the class: no argument is a tensor, and no part needs its method's clients.

    Example:
        >>> is_for_yaml(ServerOptimizer), is_for_yaml(FairStep)
        (True, False)
    """
    if not issubclass(cls, (Solver, ServerCallback)):
        return True
    parameters = inspect.signature(cls).parameters.values()
    needs_tensors = any("Tensor" in str(parameter.annotation) for parameter in parameters)
    sends = issubclass(cls, ServerCallback) and bool(cls.messages)
    return not (needs_tensors or sends or cls in NEED_CLIENT_HALF)


def import_object(class_path: str) -> Any:
    """Import the object ``package.module.Name``."""
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def find_class(name: str, base: type) -> type | None:
    """Return the class derived from ``base`` that has this name or import path; None if there is none, or several."""
    known: list[Any] = [cls for cls in subclasses(base) if cls.__name__ == name]
    if not known and "." in name:
        with contextlib.suppress(ImportError, AttributeError):
            known = [import_object(name)]
    return known[0] if len(known) == 1 and isinstance(known[0], type) and issubclass(known[0], base) else None


def arguments_of(cls: type) -> dict[str, Any]:
    """Return the arguments that a class and its base classes take in a config, with their types."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, "class", fail_untyped=False, as_group=False)
    hints = {
        action.dest.removeprefix("class."): private_cli.type_hint(action) for action in private_cli.actions(parser)
    }
    return {name: hint for name, hint in hints.items() if not name.endswith(".help")}


def base_at(path: str, sections: Mapping[str, type], chosen: Mapping[str, type] | None = None) -> type | None:
    """Return the base class that a key takes, e.g. RobustRule for ``algorithm.robust_rule``.

    Args:
        path: Dotted keys, without list indices.
        sections: Map from keys that take a class to their base classes.
        chosen: Map from keys to the classes given there; a key without one takes any class with the next argument.

    Returns:
        The base class; None if the key takes no class.
    """
    chosen = {"trainer": FederatedTrainer, **(chosen or {})}
    if path in sections:
        return sections[path]
    place, _, key = path.rpartition(".")
    if not place:
        return None
    above = base_at(place, sections, chosen)
    candidates = [chosen[place]] if place in chosen else [*choices(above), above] if above else []
    for cls in candidates:
        types = list(_classes_in(arguments_of(cls).get(key)))
        if types:
            return types[0]
    return None


def _classes_in(hint: Any) -> Iterator[type]:
    """Yield the classes in a type hint, without Python's built-in ones."""
    if isinstance(hint, type) and not get_args(hint) and hint.__module__ != "builtins":
        yield hint
    for inner in get_args(hint):
        yield from _classes_in(inner)
