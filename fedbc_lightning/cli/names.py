"""Finds algorithms by the names that papers use, in any case: ``q-FedAvg`` is QFedAvg, ``FedGeoMed+`` FedGeoMedPlus."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.cli.arguments import CONFIG_OPTIONS, option_values
from fedbc_lightning.cli.choices import import_object, subclasses

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
    chosen = [_find(name) for _, name in _named(words) if name is not None]
    return chosen[-1] if chosen else None


def foreign_configs(words: list[str]) -> set[str]:
    """Return the texts of those configs whose section ``algorithm`` is for another class than the one named last.

    No setting of such a section may reach that class. A section without a name belongs to the class named before it.

    Example:
        >>> sorted(foreign_configs(["--config", "algorithm: FedBC", "-c", "algorithm: Ditto", "--algorithm=FedBC"]))
        ['algorithm: Ditto']
    """
    chosen = chosen_algorithm(words)
    foreign: set[str] = set()
    current: type | None = None
    for text, name in _named(words):
        current = current if name is None else _find(name)
        if text is not None and current is not None and current != chosen:
            foreign.add(text)
    return foreign


def _named(words: list[str]) -> list[tuple[str | None, str | None]]:
    """Return (text, algorithm named there or None) for each config, and (None, name) for each ``--algorithm``."""
    found: list[tuple[str | None, str | None]] = []
    configs = dict(option_values(words, CONFIG_OPTIONS))
    for position, value in option_values(words, (*CONFIG_OPTIONS, *CHOICES)):
        text = Path(value).read_text(encoding="utf-8") if _is_file(value) else value
        if position in configs:
            found.append((text, _name_in(_load(text))))
        else:
            found.append((None, _name_in({"algorithm": _load(text)})))
    return found


def _name_in(config: Any) -> str | None:
    section = config.get("algorithm") if isinstance(config, dict) else None
    name = section.get("class_path") if isinstance(section, dict) else section
    return name if isinstance(name, str) else None


def _find(name: str) -> Any:
    """Return the class that is meant; the name itself if it is unknown."""
    name = class_name(name)
    known = [cls for cls in subclasses(FederatedAlgorithm) if cls.__name__ == name]
    if len(known) == 1:
        return known[0]
    try:
        return import_object(name)
    except (ImportError, AttributeError, ValueError):  # reported by the parser
        return name


def _is_file(value: str) -> bool:
    return "\n" not in value and len(value) < 1000 and Path(value).is_file()


def _load(text: str) -> Any:
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
    config = _load(content)
    if not isinstance(config, dict) or "algorithm" not in config:
        return content
    section, given = config["algorithm"], _name_in(config)
    if content in foreign:
        del config["algorithm"]
    elif given is None or class_name(given) == given:
        return content
    else:
        config["algorithm"] = (
            {**section, "class_path": class_name(given)} if isinstance(section, dict) else class_name(given)
        )
    return yaml.safe_dump(config, allow_unicode=True, sort_keys=False)
