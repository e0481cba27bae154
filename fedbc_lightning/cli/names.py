"""Algorithms by the names that papers use: ``q-FedAvg`` is QFedAvg, ``FedGeoMed+`` is FedGeoMedPlus, in any case."""

from __future__ import annotations

import re

import yaml
from jsonargparse import get_loader

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.cli.arguments import option_values
from fedbc_lightning.cli.messages import subclasses

OPTIONS = ("--algorithm", "--algorithm.help", "--algorithm.class_path")


def fold(name: str) -> str:
    """What two spellings of one name have in common.

    Example:
        >>> fold("Per-FedAvg"), fold("L2SGD++"), fold("ComposedAlgorithm")
        ('perfedavg', 'l2sgdplusplus', 'composed')
    """
    return re.sub(r"[-_]", "", name.casefold().replace("+", "plus")).removesuffix("algorithm")


def class_name(name: str) -> str:
    """The name of the algorithm's class that is meant; ``name`` itself where there is none, or more than one.

    Example:
        >>> class_name("fed-prox"), class_name("my_module.Mine"), class_name("--other")
        ('FedProx', 'my_module.Mine', '--other')
    """
    names = {cls.__name__ for cls in subclasses(FederatedAlgorithm)}
    meant = [known for known in names if fold(known) == fold(name)]
    return meant[0] if name[:1].isalnum() and name not in names and len(meant) == 1 else name


def name_classes(words: list[str]) -> list[str]:
    """The words of a command line with the algorithm's class where its usual name was.

    Example:
        >>> name_classes(["fit", "--algorithm=fedbc", "--algorithm.help", "Fed-Avg"])
        ['fit', '--algorithm=FedBC', '--algorithm.help', 'FedAvg']
    """
    words = list(words)
    for position, value in option_values(words, OPTIONS):
        words[position] = words[position].removesuffix(value) + class_name(value)
    return words


def name_class_in_config(content: str) -> str:
    """A config's text with the algorithm's class where its usual name was; the very text if there is nothing to do."""
    loader = get_loader("yaml")
    try:
        config = loader(content)
    except yaml.YAMLError:  # reported by the parser, with its place
        return content
    section = config.get("algorithm") if isinstance(config, dict) else None
    given = section.get("class_path") if isinstance(section, dict) else section
    if not isinstance(given, str) or class_name(given) == given:
        return content
    config["algorithm"] = (
        {**section, "class_path": class_name(given)} if isinstance(section, dict) else class_name(given)
    )
    return yaml.safe_dump(config, allow_unicode=True, sort_keys=False)
