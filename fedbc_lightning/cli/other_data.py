"""Decides which settings of a config's data reach the class of data that a command line takes in their place."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule

from fedbc_lightning.cli.names import classes_of_configs, find_class, load, named_in

OF_ONE_CLASS = ("test", "test_fraction", "split_order")
"""Arguments that say where test data come from. Each class of data has its own answer, and some bring test data."""


class OtherData(NamedTuple):
    """The section ``data`` of a config whose class is not the one that is built.

    Attributes:
        section: The section that the class that is built gets in its place.
        line: Says which of its settings were kept and which were dropped.
    """

    section: dict[str, Any]
    line: str


def other_data(words: list[str]) -> dict[str, OtherData]:
    """Return what becomes of the section ``data`` of each config that is for another class than the one named last.

    A setting of such a section is kept if the user chose it, so that it differs from the default of its own class, and
    if the class that is built takes it. What is test data is never kept.

    Args:
        words: Words of the command line.

    Returns:
        Map from the texts of the configs.
    """
    named = [_find(name) for _, name in named_in(words, "data") if name is not None]
    chosen = named[-1] if named else None
    found = {}
    for text, cls in classes_of_configs(words, "data", _find):
        section = (load(text) or {}).get("data") if cls is not chosen else None
        if isinstance(section, dict) and isinstance(cls, type) and isinstance(chosen, type):
            found[text] = _carried_over(section.get("init_args") or {}, cls, chosen)
    return found


def with_other_data(content: str, other: OtherData) -> str:
    """Return the text of a config with another section ``data``."""
    return yaml.safe_dump(load(content) | {"data": other.section}, allow_unicode=True, sort_keys=False)


def _carried_over(given: dict[str, Any], old: type, new: type) -> OtherData:
    defaults, takes = _defaults(old), _defaults(new)
    chosen = {name: value for name, value in given.items() if name not in defaults or not _is(value, defaults[name])}
    kept = {name: value for name, value in chosen.items() if name in takes and name not in OF_ONE_CLASS}
    dropped = {name: value for name, value in given.items() if name in {*chosen, *OF_ONE_CLASS} - {*kept}}
    line = (
        f"data: {new.__name__} takes the place of the config's {old.__name__}. Kept: {_in_words(kept)}; dropped: "
        f"{_in_words(dropped)}; what is a default of {old.__name__} counts for it alone."
    )
    return OtherData({"class_path": f"{new.__module__}.{new.__qualname__}", "init_args": kept}, line)


def _find(name: str) -> Any:
    return find_class(name, LightningDataModule)


def _defaults(cls: type) -> dict[str, Any]:
    """Return the arguments of a class and its base classes with their defaults."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, "of", fail_untyped=False, sub_configs=False)
    return {**dict.fromkeys(inspect.signature(cls).parameters), **vars(parser.get_defaults().get("of", Namespace()))}


def _is(value: Any, default: Any) -> bool:
    """Return whether a value of a config is the default of an argument; YAML knows no tuples."""
    return value == (list(default) if isinstance(default, tuple) else default)


def _in_words(settings: dict[str, Any]) -> str:
    parts = (_short(value) for value in settings.values())
    return ", ".join(f"{name}={part}" for name, part in zip(settings, parts, strict=True)) or "nothing"


def _short(value: Any) -> str:
    """Return a value for a message; of a class with its arguments, the name of the class.

    Example:
        >>> _short({"class_path": "a.IID", "init_args": {"num_clients": 3}}), _short(0.2)
        ('IID', '0.2')
    """
    is_class = isinstance(value, dict) and isinstance(value.get("class_path"), str)
    return value["class_path"].rpartition(".")[2] if is_class else str(value)
