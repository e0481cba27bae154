"""Classes by their names: those that a config can choose, and algorithms by the names that papers use, in any case.

``q-FedAvg`` is QFedAvg, ``FedGeoMed+`` is FedGeoMedPlus.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from jsonargparse import ArgumentParser, get_loader
from lightning.pytorch.callbacks import BasePredictionWriter, Checkpoint
from lightning.pytorch.cli import SaveConfigCallback

from fedbc_lightning import server
from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.algorithms.l2gd import Coin
from fedbc_lightning.cli.command_arguments import CONFIG_OPTIONS, option_values
from fedbc_lightning.core import private_cli
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.indexed import IndexedDataModule
from fedbc_lightning.local import Solver
from fedbc_lightning.trainer.arguments import REFUSED_CALLBACKS
from fedbc_lightning.trainer.trainer import FederatedTrainer

# Not offered: bases of others, or parts that a method makes itself
NO_CHOICES = (Coin, server.ServerOptimizer, BasePredictionWriter, Checkpoint, FederatedDataModule, IndexedDataModule)

# Not offered, together with all classes derived from them
UNWANTED: tuple[type, ...] = (SaveConfigCallback, *REFUSED_CALLBACKS)

# Server parts that are not offered, because they need what the clients of their own method keep or send
NEED_CLIENT_HALF = (
    server.AugmentedMean, server.CenterConsensus, server.DynamicRegularization, server.FairStep,
    server.LargestClientStep, server.MeanMessage,
)  # fmt: skip

# Options that name an algorithm
CHOICES = ("--algorithm", "--algorithm.class_path")


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
        >>> is_for_yaml(server.ServerOptimizer), is_for_yaml(server.FairStep)
        (True, False)
    """
    if not issubclass(cls, (Solver, server.ServerCallback)):
        return True
    parameters = inspect.signature(cls).parameters.values()
    needs_tensors = any("Tensor" in str(parameter.annotation) for parameter in parameters)
    sends = issubclass(cls, server.ServerCallback) and bool(cls.messages)
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


def import_path(cls: type) -> str:
    """Return the import path of a class: that in the parent package if it exports the class, else in its module."""
    package = cls.__module__.rpartition(".")[0]
    exported = package and getattr(importlib.import_module(package), cls.__name__, None) is cls
    return f"{package if exported else cls.__module__}.{cls.__name__}"


def base_at(path: str, sections: Mapping[str, type]) -> type | None:
    """Return the base class that a key takes, e.g. RobustRule for ``algorithm.robust_rule``.

    A key inside of a class is looked for in all classes that can be chosen there, so that none need be named.

    Args:
        path: Dotted keys, without list indices.
        sections: Map from keys that take a class to their base classes.

    Returns:
        The base class; None if the key takes no class.
    """
    if path in sections:
        return sections[path]
    place, _, key = path.rpartition(".")
    above = FederatedTrainer if place == "trainer" else base_at(place, sections) if place else None
    owners = [*choices(above), above] if above else []
    return next((kind for cls in owners for kind in _classes_in(arguments_of(cls).get(key))), None)


def _classes_in(hint: Any) -> Iterator[type]:
    """Yield the classes in a type hint, without Python's built-in ones."""
    if isinstance(hint, type) and not get_args(hint) and hint.__module__ != "builtins":
        yield hint
    for inner in get_args(hint):
        yield from _classes_in(inner)


def fold(name: str) -> str:
    """Return the form that all spellings of a name have in common.

    Example:
        >>> fold("Per-FedAvg"), fold("L2SGD++"), fold("ComposedAlgorithm")
        ('perfedavg', 'l2sgdplusplus', 'composed')
    """
    return re.sub(r"[-_]", "", name.casefold().replace("+", "plus")).removesuffix("algorithm")


def class_name(name: str) -> str:
    """Return the class name of the algorithm that is meant; ``name`` itself if there is none or more than one.

    Example:
        >>> class_name("fed-prox"), class_name("my_module.Mine"), class_name("--other")
        ('FedProx', 'my_module.Mine', '--other')
    """
    names = {cls.__name__ for cls in subclasses(FederatedAlgorithm)}
    meant = [known for known in names if fold(known) == fold(name)]
    return meant[0] if name[:1].isalnum() and name not in names and len(meant) == 1 else name


def name_classes(words: list[str]) -> list[str]:
    """Replace the usual name of an algorithm in a command line by the name of its class.

    Example:
        >>> name_classes(["fit", "--algorithm=fedbc", "--algorithm.help", "Fed-Avg"])
        ['fit', '--algorithm=FedBC', '--algorithm.help', 'FedAvg']
    """
    words = list(words)
    for position, value in option_values(words, (*CHOICES, "--algorithm.help")):
        words[position] = words[position].removesuffix(value) + class_name(value)
    return words


def foreign_configs(words: list[str]) -> set[str]:
    """Return the texts of those configs whose section ``algorithm`` is for another class than the one named last.

    jsonargparse would carry arguments of the same name over to it, but FedBC's ``dual_lr`` says nothing of a method's
    own. A section without a name belongs to the class named before it.

    Example:
        >>> sorted(foreign_configs(["--config", "algorithm: FedBC", "-c", "algorithm: Ditto", "--algorithm=FedBC"]))
        ['algorithm: Ditto']
    """
    configs = dict(option_values(words, CONFIG_OPTIONS))
    named: list[tuple[str | None, str]] = []
    for position, value in option_values(words, (*CONFIG_OPTIONS, *CHOICES)):
        if position in configs:
            # isfile is False, too, for texts that are too long for a name
            text = Path(value).read_text(encoding="utf-8") if os.path.isfile(value) else value
            content = load(text)
            named.append((text, _name_in(content.get("algorithm") if isinstance(content, dict) else None)))
        else:
            named.append((None, _name_in(load(value))))
    chosen = next((fold(name) for _, name in reversed(named) if name), "")
    foreign, current = set(), ""
    for config, name in named:
        current = fold(name) or current
        if config is not None and current and current != chosen:
            foreign.add(config)
    return foreign


def _name_in(section: Any) -> str:
    """Return the class that a section names, without its package; empty if it names none."""
    name = section.get("class_path") if isinstance(section, dict) else section
    return name.rpartition(".")[2] if isinstance(name, str) else ""


def load(text: str) -> Any:
    """Return what a config's text holds; None if it is no YAML."""
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:  # reported by the parser, with its place
        return None


def name_class_in_config(content: str, foreign: Collection[str] = ()) -> str:
    """Replace the usual name of an algorithm in a config by its class; return the same text if there is none.

    Args:
        content: Text of the config.
        foreign: Texts whose section ``algorithm`` is left out; see :func:`foreign_configs`.
    """
    config = load(content)
    if not isinstance(config, dict) or "algorithm" not in config:
        return content
    section = config["algorithm"]
    given = section.get("class_path") if isinstance(section, dict) else section
    if content in foreign:
        del config["algorithm"]
    elif not isinstance(given, str) or class_name(given) == given:
        return content
    else:
        config["algorithm"] = (section if isinstance(section, dict) else {}) | {"class_path": class_name(given)}
    return yaml.safe_dump(config, allow_unicode=True, sort_keys=False)
