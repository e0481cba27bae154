"""Finds the file and the line of a config in which a key stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from fedbc_lightning.cli.command_arguments import CONFIG_OPTIONS, option_values


def place_of_key(key: str, words: Sequence[str], value: str | None = None) -> str | None:
    """Return file and line of a key, such as ``mine.yaml, line 3``.

    Args:
        key: The key, such as ``trainer.max_rounds``; ``init_args`` may be left out of it.
        words: The command line, whose last config with the key is meant.
        value: What the key is given there, if several configs have it.

    Returns:
        The place; None if no config file has the key, or the command line itself gives it.
    """
    if any(word.partition("=")[0] == f"--{key}" for word in words):
        return None
    files = [Path(given) for _, given in option_values(list(words), CONFIG_OPTIONS) if _is_file(given)]
    found = [(file, node) for file in reversed(files) for node in _nodes(file, key.split("."))]
    same = [pair for pair in found if value is not None and pair[1][1].value == value]
    for file, (name, _) in same or found:
        return f"{file}, line {name.start_mark.line + 1}"
    return None


def _is_file(name: str) -> bool:
    return "\n" not in name and len(name) < 4096 and Path(name).is_file()


def _nodes(file: Path, keys: Sequence[str]) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield key and value of a path in a file."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError):
        return
    yield from _below(root, list(keys))


def _below(node: yaml.Node | None, keys: list[str]) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _below(child, keys)
    if not isinstance(node, yaml.MappingNode):
        return
    for name, child in node.value:
        if name.value == keys[0] and len(keys) == 1:
            yield name, child
        elif name.value == keys[0]:
            yield from _below(child, keys[1:])
        elif name.value == "init_args":
            yield from _below(child, keys)
