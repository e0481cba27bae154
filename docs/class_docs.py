"""Takes docstrings of classes apart for the pages: one line, then titled sections of prose and formulas, and arguments.

A section has a title in the first column that ends in ``:`` (prose) or ``::`` (formulas, which stay as they are). In
prose, too, lines that are indented or have columns aligned by spaces stay as they are.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jsonargparse import ArgumentParser

from fedbc_lightning.algorithms.base import usual_name
from fedbc_lightning.core import private_cli

_TITLE = re.compile(r"([A-Z][\w -]*?)(::?)")
_ENTRIES = ("Args", "Attributes", "Raises")


@dataclass(frozen=True)
class Block:
    """Successive lines of a section that are shown in the same way.

    Attributes:
        kind: ``prose`` (one line, to be wrapped), ``items`` (lines to be wrapped one by one) or ``literal``.
        lines: The lines, without common indentation.
    """

    kind: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class ClassDoc:
    """The parts of a class's docstring.

    Attributes:
        name: Usual name, which stands before the colon of the first line; else the name of the class.
        summary: Rest of the first line.
        sections: Map from titles to blocks; the title of text before the first title is "".
    """

    name: str
    summary: str
    sections: dict[str, list[Block]]


@dataclass(frozen=True)
class Parameter:
    """An argument of a class in a config; ``default`` is written in YAML, None if the argument is required."""

    name: str
    default: str | None
    meaning: str


def read_docstring(cls: type) -> ClassDoc:
    """Take a class's docstring apart.

    Example:
        >>> class Median:
        ...     '''Median-1: the median
        ...     of the clients.
        ...
        ...     Update::
        ...
        ...         z ← median(w_i)
        ...
        ...     State:
        ...         None; see
        ...         :class:`Mean`.
        ...     '''
        >>> doc = read_docstring(Median)
        >>> doc.name, doc.summary
        ('Median-1', 'the median of the clients.')
        >>> doc.sections["Update"]
        [Block(kind='literal', lines=('z ← median(w_i)',))]
        >>> doc.sections["State"]
        [Block(kind='prose', lines=('None; see :class:`Mean`.',))]
    """
    first, _, rest = (inspect.getdoc(cls) or "").partition("\n\n")
    first = " ".join(first.split()).removesuffix("::")
    name = usual_name(cls)
    summary = first.removeprefix(f"{name}: ")
    sections = {title: _blocks(text, title, literal) for title, literal, text in _sections(rest)}
    return ClassDoc(name, summary, {title: blocks for title, blocks in sections.items() if blocks})


def read_parameters(cls: type) -> list[Parameter]:
    """Return the arguments that jsonargparse finds for a class and its base classes."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, "class", fail_untyped=False, as_group=False)
    return [
        Parameter(
            name=action.dest.removeprefix("class."),
            default=None if action.required else _as_yaml(action.default),
            meaning=" ".join((action.help or "").split()),
        )
        for action in private_cli.actions(parser)
        if action.dest.startswith("class.") and not action.dest.endswith(".help")
    ]


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return ".inf" if value == float("inf") else str(value)


def _sections(text: str) -> Iterator[tuple[str, bool, str]]:
    """Yield the title of each section, whether it is literal, and its text."""
    title, literal, lines = "", False, list[str]()
    for line in text.splitlines():
        match = _TITLE.fullmatch(line.rstrip())
        if match:
            yield title, literal, textwrap.dedent("\n".join(lines)).strip("\n")
            title, literal, lines = match[1], match[2] == "::", []
        else:
            lines.append(line.rstrip())
    yield title, literal, textwrap.dedent("\n".join(lines)).strip("\n")


def _blocks(text: str, title: str, literal: bool) -> list[Block]:
    if literal:
        return [Block("literal", tuple(text.splitlines()))] if text else []
    blocks: list[Block] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        if title in _ENTRIES or (lines and lines[0].startswith(("- ", "* "))):
            blocks.append(Block("items", tuple(_items(lines))))
        else:
            blocks += _split(lines)
    for i, (before, after) in enumerate(pairwise(blocks)):
        if before.kind == "prose" and before.lines[0].endswith("::") and after.kind == "literal":
            blocks[i] = Block("prose", (before.lines[0].removesuffix(":"),))
    return blocks


def _items(lines: list[str]) -> Iterator[str]:
    """Yield one line for each item, joined with the indented lines below it."""
    for item in re.split(r"\n(?=\S)", "\n".join(lines)):
        yield " ".join(re.sub(r"^[-*] ", "", item).split())


def _split(lines: list[str]) -> Iterator[Block]:
    """Yield each paragraph as prose, or as literal if it is indented, is a doctest, or has aligned columns."""
    if any(re.search(r"\S {2,}\S|^>>> ", line) for line in lines):
        yield Block("literal", tuple(textwrap.dedent("\n".join(lines)).splitlines()))
        return
    while lines:
        indented = lines[0].startswith(" ")
        end = next((i for i, line in enumerate(lines) if line.startswith(" ") != indented), len(lines))
        if indented:
            yield Block("literal", tuple(textwrap.dedent("\n".join(lines[:end])).splitlines()))
        else:
            yield Block("prose", (" ".join(lines[:end]),))
        lines = lines[end:]
