"""What can be chosen by name: the classes below a base class, and the base class that a nested key takes."""

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
from fedbc_lightning.local import Penalty, Solver, TermFactory
from fedbc_lightning.server import (
    AugmentedMean,
    CenterConsensus,
    DynamicRegularization,
    FairStep,
    LargestClientStep,
    MeanMessage,
    RobustRule,
    ServerCallback,
    ServerOptimizer,
)
from fedbc_lightning.trainer.arguments import _REFUSED_CALLBACKS
from fedbc_lightning.trainer.trainer import FederatedTrainer

PART_KINDS: dict[type, str] = {
    RobustRule: "robust rule",
    TermFactory: "term",
    Solver: "solver",
    ServerCallback: "server part",
    Penalty: "penalty",
    FederatedAlgorithm: "method",
}
"""What the classes of a config are called in a sentence, by their base classes."""

NO_CHOICES = (Coin, ServerOptimizer, BasePredictionWriter, Checkpoint)
"""What others are derived from, or a method makes for itself."""

UNWANTED: tuple[type, ...] = (SaveConfigCallback, *_REFUSED_CALLBACKS)
"""These and what is derived from them."""

NEED_CLIENT_HALF = (AugmentedMean, CenterConsensus, DynamicRegularization, FairStep, LargestClientStep, MeanMessage)
"""Server parts that work on what only their own method's client half keeps or sends."""


def subclasses(base: type) -> set[type]:
    """All classes below ``base`` that have been imported."""
    below: set[type] = set()
    children: list[type] = base.__subclasses__()
    for child in children:
        below |= {child, *subclasses(child)}
    return below


def choices(base: type) -> list[type]:
    """The classes below ``base`` that can be given in a config, ours first, by name.

    Example:
        >>> [cls.__name__ for cls in choices(Solver) if is_ours(cls)]
        ['Armijo', 'ModelAgnostic', 'MoreauEnvelope']
    """
    found = [
        cls
        for cls in subclasses(base)
        if not inspect.isabstract(cls) and not cls.__name__.startswith("_") and cls not in NO_CHOICES
        if not issubclass(cls, UNWANTED) and is_for_yaml(cls)
        if not cls.__module__.startswith("fedbc_lightning.papers.")  # for one paper's study; given by path
    ]
    return sorted(found, key=lambda cls: (not is_ours(cls), cls.__name__))


def is_ours(cls: type) -> bool:
    """Whether the class belongs to this package."""
    return cls.__module__.split(".")[0] == "fedbc_lightning"


def is_for_yaml(cls: type) -> bool:
    """Whether a config can hold it: no argument is a tensor, and no part is useless without its own client half.

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
    """What a class is called in a sentence, or "".

    Example:
        >>> kind_of(AugmentedMean)
        'server part'
    """
    return next((kind for base, kind in PART_KINDS.items() if issubclass(cls, base)), "")


def import_object(class_path: str) -> Any:
    """The object behind ``package.module.Name``."""
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def type_hint(cls: type, argument: str) -> Any:
    """The type of an argument of a class, its base classes' included; None if it has no such argument."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, "class", fail_untyped=False, as_group=False)
    found = [action for action in parser._actions if action.dest == f"class.{argument}"]
    return getattr(found[0], "_typehint", None) if found else None


def base_at(path: str, sections: Mapping[str, type], chosen: Mapping[str, type] | None = None) -> type | None:
    """The class that is wanted under a key, e.g. RobustRule under ``algorithm.robust_rule``.

    Args:
        path: Keys, without list indices.
        sections: Keys that name a class to what it must be.
        chosen: Keys to the classes given there; where there is none, any that has the next argument counts.

    Returns:
        None if no class is wanted there.
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
    """Whether what lies under a key is a list, or a mapping, of classes."""
    place, _, key = path.rpartition(".")
    if place == "trainer":
        return key == "callbacks"
    hint = type_hint(chosen[place], key) if place in chosen else None
    return any(get_origin(kind) in (list, dict) and any(_classes_in(kind)) for kind in (hint, *get_args(hint)))


def _classes_in(hint: Any) -> Iterator[type]:
    """The classes, other than Python's own, that a type hint is made of."""
    if isinstance(hint, type) and not get_args(hint) and hint.__module__ != "builtins":
        yield hint
    for inner in get_args(hint):
        yield from _classes_in(inner)
