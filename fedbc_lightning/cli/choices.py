"""Lists the classes that can be chosen by name, and finds the base class that a nested key takes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import BasePredictionWriter, Checkpoint
from lightning.pytorch.cli import SaveConfigCallback

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.algorithms.l2gd import Coin
from fedbc_lightning.core import private_cli
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.indexed import IndexedDataModule
from fedbc_lightning.local import Penalty, Solver, TermFactory
from fedbc_lightning.server import (
    AugmentedMean,
    CenterConsensus,
    Codec,
    DynamicRegularization,
    FairStep,
    LargestClientStep,
    MeanMessage,
    RobustRule,
    ServerCallback,
    ServerOptimizer,
)
from fedbc_lightning.trainer.arguments import REFUSED_CALLBACKS
from fedbc_lightning.trainer.trainer import FederatedTrainer

PART_KINDS: dict[type, str] = {
    RobustRule: "robust rule",
    Codec: "codec",
    TermFactory: "term",
    Solver: "solver",
    ServerCallback: "server part",
    Penalty: "penalty",
    FederatedAlgorithm: "method",
}
"""Names for the classes of a config in messages, by their base classes."""

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


def kind_of(cls: type) -> str:
    """Return the name for a kind of class in messages, or "".

    Example:
        >>> kind_of(AugmentedMean)
        'server part'
    """
    return next((kind for base, kind in PART_KINDS.items() if issubclass(cls, base)), "")


def import_object(class_path: str) -> Any:
    """Import the object ``package.module.Name``."""
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def type_hint(cls: type, argument: str) -> Any:
    """Return the type of an argument of a class or its base classes; None if it has no such argument."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, "class", fail_untyped=False, as_group=False)
    found = [action for action in private_cli.actions(parser) if action.dest == f"class.{argument}"]
    return private_cli.type_hint(found[0]) if found else None


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
        types = list(_classes_in(type_hint(cls, key)))
        if types:
            return types[0]
    return None


def is_list(path: str, chosen: Mapping[str, type]) -> bool:
    """Return whether a key takes a list, or a mapping, of classes."""
    place, _, key = path.rpartition(".")
    if place == "trainer":
        return key == "callbacks"
    hint = type_hint(chosen[place], key) if place in chosen else None
    return any(get_origin(kind) in (list, dict) and any(_classes_in(kind)) for kind in (hint, *get_args(hint)))


def _classes_in(hint: Any) -> Iterator[type]:
    """Yield the classes in a type hint, without Python's built-in ones."""
    if isinstance(hint, type) and not get_args(hint) and hint.__module__ != "builtins":
        yield hint
    for inner in get_args(hint):
        yield from _classes_in(inner)
