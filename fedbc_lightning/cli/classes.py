"""Classes by their names: those that a config can choose, and algorithms by the names that papers use, in any case.

``q-FedAvg`` is QFedAvg, ``FedGeoMed+`` is FedGeoMedPlus.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
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
from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.origin import is_ours, subclasses
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.indexed import IndexedDataModule
from fedbc_lightning.local import LooplessSteps, Mixture
from fedbc_lightning.trainer.arguments import REFUSED_CALLBACKS
from fedbc_lightning.trainer.trainer import FederatedTrainer

# Not offered: bases of others, or parts that a method makes itself
NO_CHOICES = (Coin, server.ServerOptimizer, BasePredictionWriter, Checkpoint, FederatedDataModule, IndexedDataModule)

# Not offered, together with all classes derived from them
UNWANTED: tuple[type, ...] = (SaveConfigCallback, *REFUSED_CALLBACKS)

# Not offered, because they take tensors, or need what the clients of their own method keep or send
IN_PYTHON = (
    LooplessSteps, Mixture, server.AugmentedMean, server.CenterConsensus, server.DynamicRegularization,
    server.FairStep, server.LargestClientStep, server.MeanMessage,
)  # fmt: skip

# Options that name an algorithm
CHOICES = ("--algorithm", "--algorithm.class_path")


def choices(base: type) -> list[type]:
    """Return the classes derived from ``base`` that a config can name, those of this package first, sorted by name.

    Example:
        >>> [cls.__name__ for cls in choices(server.ServerOptimizer)][:2]
        ['Extrapolation', 'FrankWolfe']
    """
    found = [
        cls
        for cls in subclasses(base)
        if not inspect.isabstract(cls) and not cls.__name__.startswith("_")
        if cls not in (*NO_CHOICES, *IN_PYTHON) and not issubclass(cls, UNWANTED)
        if not cls.__module__.startswith("fedbc_lightning.papers.")  # needed by one paper's study, which names the path
    ]
    return sorted(found, key=lambda cls: (not is_ours(cls), cls.__name__))


def import_object(class_path: str) -> Any:
    """Import the object ``package.module.Name``."""
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def why_no_import(class_path: str) -> str | None:
    """Return why ``package.module.Name`` cannot be imported, with the line of the user's file; None if it can be."""
    module, _, name = class_path.rpartition(".")
    try:
        found = importlib.import_module(module)
    except SyntaxError as error:
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return str(error)
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [frame for frame in frames if not frame.filename.startswith((sys.prefix, sys.base_prefix, "<"))]
        place = (own or frames)[-1]
        said = f": {first_line(error)}" * bool(str(error))
        return f"{place.filename}, line {place.lineno}: {type(error).__name__}{said}"
    return None if hasattr(found, name) else f"module '{module}' has no attribute '{name}'"


def find_class(name: str, base: type) -> type | None:
    """Return the class derived from ``base`` that has this name or import path; None if there is none, or several."""
    known = [cls for cls in subclasses(base) if cls.__name__ == name]
    if not known and "." in name:
        with contextlib.suppress(ImportError, AttributeError):
            known = [import_object(name)]
    return known[0] if len(known) == 1 and isinstance(known[0], type) and issubclass(known[0], base) else None


def arguments_of(cls: type) -> dict[str, Any]:
    """Return the arguments that a class and its base classes take in a config, with their types."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, "class", fail_untyped=False, as_group=False)
    actions = [action for action in private_cli.actions(parser) if not action.dest.endswith(".help")]
    return {action.dest.removeprefix("class."): private_cli.type_hint(action) for action in actions}


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


def rewritten_configs(words: list[str]) -> dict[str, str]:
    r"""Map the texts of some configs of a command line to others, in which an algorithm is named by its class.

    A section ``algorithm`` for another class than the one named last is left out. jsonargparse would carry arguments
    of the same name over to it, but FedBC's ``dual_lr`` says nothing of a method's own. A section without a name
    belongs to the class named before it.

    Example:
        >>> list(rewritten_configs(["-c", "algorithm: fedbc", "-c", "algorithm: Ditto", "--algorithm=FedBC"]).values())
        ['algorithm:\n  class_path: FedBC\n', '{}\n']
    """
    configs, chosen = dict(option_values(words, CONFIG_OPTIONS)), ""
    sections, texts = [], dict[str, str]()
    for position, value in option_values(words, (*CONFIG_OPTIONS, *CHOICES)):
        is_config = position in configs
        is_file = is_config and os.path.isfile(value)  # False, too, for texts that are too long for a name
        text = Path(value).read_text(encoding="utf-8") if is_file else value
        content = load(text) if is_config else {"algorithm": load(text)}
        section = content.get("algorithm") if isinstance(content, dict) else None
        name = section.get("class_path") if isinstance(section, dict) else section
        if isinstance(name, str):
            chosen = fold(name.rpartition(".")[2])
        if is_config and isinstance(name, str) and class_name(name) != name:
            content["algorithm"] = (section if isinstance(section, dict) else {}) | {"class_path": class_name(name)}
            texts[text] = yaml.safe_dump(content, allow_unicode=True, sort_keys=False)
        if is_config and section is not None:
            sections.append((text, content, chosen))
    for text, content, owner in sections:
        if owner and owner != chosen:
            others = {key: value for key, value in content.items() if key != "algorithm"}
            texts[text] = yaml.safe_dump(others, allow_unicode=True, sort_keys=False)
    return texts


def load(text: str) -> Any:
    """Return what a config's text holds; None if it is no YAML."""
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:  # reported by the parser, with its place
        return None
