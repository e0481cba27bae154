"""Finds algorithms by the names that papers use, in any case: ``q-FedAvg`` is QFedAvg, ``FedGeoMed+`` FedGeoMedPlus."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.cli.choices import import_object, subclasses
from fedbc_lightning.cli.command_arguments import CONFIG_OPTIONS, option_values

CHOICES = ("--algorithm", "--algorithm.class_path")

OPTIONS = (*CHOICES, "--algorithm.help")


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
    for position, value in option_values(words, OPTIONS):
        words[position] = words[position].removesuffix(value) + class_name(value)
    return words


def chosen_algorithm(words: list[str]) -> type | None:
    """Return the algorithm class that is named last, on the command line or in a config; None if there is none.

    Example:
        >>> chosen_algorithm(["fit", "--config", "algorithm: FedBC", "--algorithm", "fed-prox"]).__name__
        'FedProx'
    """
    chosen = [_find(name) for _, name in named_in(words, "algorithm") if name is not None]
    return chosen[-1] if chosen else None


def foreign_configs(words: list[str]) -> set[str]:
    """Return the texts of those configs whose section ``algorithm`` is for another class than the one named last.

    No setting of such a section may reach that class. A section without a name belongs to the class named before it.

    Example:
        >>> sorted(foreign_configs(["--config", "algorithm: FedBC", "-c", "algorithm: Ditto", "--algorithm=FedBC"]))
        ['algorithm: Ditto']
    """
    chosen, sections = chosen_algorithm(words), classes_of_configs(words, "algorithm", _find)
    return {text for text, cls in sections if cls is not None and cls != chosen}


def classes_of_configs(words: list[str], section: str, find: Callable[[str], Any]) -> list[tuple[str, Any]]:
    """Return the text of each config with the class that its section is for.

    A section without a name belongs to the class named before it, None if there is none.

    Args:
        words: Words of the command line.
        section: ``"algorithm"`` or ``"data"``.
        find: Function from a name to the class that is meant.
    """
    found: list[tuple[str, Any]] = []
    current: Any = None
    for text, name in named_in(words, section):
        current = current if name is None else find(name)
        if text is not None:
            found.append((text, current))
    return found


def named_in(words: list[str], section: str) -> list[tuple[str | None, str | None]]:
    """Return (text, class named in the section or None) for each config, and (None, class) for each option."""
    found: list[tuple[str | None, str | None]] = []
    configs, options = dict(option_values(words, CONFIG_OPTIONS)), (f"--{section}", f"--{section}.class_path")
    for position, value in option_values(words, (*CONFIG_OPTIONS, *options)):
        text = Path(value).read_text(encoding="utf-8") if _is_file(value) else value
        if position in configs:
            found.append((text, _name_in(load(text), section)))
        else:
            found.append((None, _name_in({section: load(text)}, section)))
    return found


def _name_in(config: Any, section: str) -> str | None:
    given = config.get(section) if isinstance(config, dict) else None
    name = given.get("class_path") if isinstance(given, dict) else given
    return name if isinstance(name, str) else None


def _find(name: str) -> Any:
    """Return the algorithm that is meant; the name itself if it is unknown."""
    return find_class(class_name(name), FederatedAlgorithm)


def find_class(name: str, base: type) -> Any:
    """Return the class derived from ``base`` with this name or path; the name itself if it is unknown."""
    known = [cls for cls in subclasses(base) if cls.__name__ == name]
    if len(known) == 1:
        return known[0]
    try:
        return import_object(name)
    except (ImportError, AttributeError, ValueError):  # reported by the parser
        return name


def _is_file(value: str) -> bool:
    return os.path.isfile(value)  # which is False, too, for texts that are too long for a name


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
    section, given = config["algorithm"], _name_in(config, "algorithm")
    if content in foreign:
        del config["algorithm"]
    elif given is None or class_name(given) == given:
        return content
    else:
        config["algorithm"] = (
            {**section, "class_path": class_name(given)} if isinstance(section, dict) else class_name(given)
        )
    return yaml.safe_dump(config, allow_unicode=True, sort_keys=False)
