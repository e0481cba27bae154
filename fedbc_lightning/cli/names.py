"""Finds algorithms by the names that papers use, in any case: ``q-FedAvg`` is QFedAvg, ``FedGeoMed+`` FedGeoMedPlus."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.cli.choices import subclasses
from fedbc_lightning.cli.command_arguments import CONFIG_OPTIONS, option_values

CHOICES = ("--algorithm", "--algorithm.class_path")


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


def named_algorithms(words: list[str]) -> list[tuple[str | None, str | None]]:
    """Return (text, name of the algorithm in it or None) for each config, and (None, name) for each option."""
    found: list[tuple[str | None, str | None]] = []
    configs = dict(option_values(words, CONFIG_OPTIONS))
    for position, value in option_values(words, (*CONFIG_OPTIONS, *CHOICES)):
        is_file = position in configs and os.path.isfile(value)  # False, too, for texts that are too long for a name
        text = Path(value).read_text(encoding="utf-8") if is_file else value
        content = load(text)
        if position in configs:
            found.append((text, _name_in(content.get("algorithm") if isinstance(content, dict) else None)))
        else:
            found.append((None, _name_in(content)))
    return found


def foreign_configs(words: list[str]) -> set[str]:
    """Return the texts of those configs whose section ``algorithm`` is for another class than the one named last.

    jsonargparse would carry arguments of the same name over to it, but FedBC's ``dual_lr`` says nothing of a method's
    own. A section without a name belongs to the class named before it.

    Example:
        >>> sorted(foreign_configs(["--config", "algorithm: FedBC", "-c", "algorithm: Ditto", "--algorithm=FedBC"]))
        ['algorithm: Ditto']
    """
    foreign, current = set(), None
    named = [(text, name and fold(name.rpartition(".")[2])) for text, name in named_algorithms(words)]
    chosen = next((name for _, name in reversed(named) if name), None)
    for text, name in named:
        current = name or current
        if text is not None and current not in (None, chosen):
            foreign.add(text)
    return foreign


def _name_in(section: Any) -> str | None:
    name = section.get("class_path") if isinstance(section, dict) else section
    return name if isinstance(name, str) else None


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
    section, given = config["algorithm"], _name_in(config["algorithm"])
    if content in foreign:
        del config["algorithm"]
    elif given is None or class_name(given) == given:
        return content
    else:
        section = section if isinstance(section, dict) else {}
        config["algorithm"] = section | {"class_path": class_name(given)}
    return yaml.safe_dump(config, allow_unicode=True, sort_keys=False)
