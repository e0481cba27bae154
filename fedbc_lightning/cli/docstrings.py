"""Docstrings of algorithms taken apart: one line, then titled sections of prose and formulas.

Both the terminal (``--algorithm.help FedProx``) and ``docs/algorithms.md`` are made from them. A section has a title in
the first column, with ``:`` (prose, joined and wrapped anew) or ``::`` (formulas, left as they are). In prose, too,
lines stay as they are where they are indented or where columns are aligned by spaces.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jsonargparse import ArgumentParser

from fedbc_lightning.algorithms.base import usual_name

_TITLE = re.compile(r"([A-Z][\w -]*?)(::?)")
MARKUP = re.compile(
    r"(?P<role>:\w+:)?(?P<ticks>`+)(?P<last>~?)(?P<code>[^`]+)(?P=ticks)|(?<![\w*])\*(?P<emphasis>\w[^*]*)\*(?![\w*])"
)
"""``:role:`text```, ```text```, of which ~ leaves the last name alone, and *text*."""

_ENTRIES = ("Args", "Attributes", "Raises")


@dataclass(frozen=True)
class Block:
    """Some lines of a section.

    Attributes:
        kind: ``prose`` (one line, to be wrapped), ``items`` (likewise each) or ``literal`` (lines as they stand).
        lines: Without common indentation.
    """

    kind: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class ClassDoc:
    """A class's docstring.

    Attributes:
        name: What stands before the colon of the first line, the usual name; else the class's.
        summary: The rest of the first line.
        sections: Title to its blocks; text before the first title is under "".
    """

    name: str
    summary: str
    sections: dict[str, list[Block]]


@dataclass(frozen=True)
class Parameter:
    """An argument of a class in a config: ``default`` as YAML has it, None if it must be given."""

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
    """The arguments that a class takes in a config, its base classes' included, as jsonargparse finds them."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, "class", fail_untyped=False, as_group=False)
    return [
        Parameter(
            name=action.dest.removeprefix("class."),
            default=None if action.required else _as_yaml(action.default),
            meaning=" ".join((action.help or "").split()),
        )
        for action in parser._actions
        if action.dest.startswith("class.") and not action.dest.endswith(".help")
    ]


def import_path(cls: type) -> str:
    """The shortest path: of the package that exports the class, if its module lies directly in one that does."""
    package = cls.__module__.rpartition(".")[0]
    exported = package and getattr(importlib.import_module(package), cls.__name__, None) is cls
    return f"{package if exported else cls.__module__}.{cls.__name__}"


def plain(text: str) -> str:
    """Text without markup: ``:class:`~a.B``` is B, ```x``` is x.

    Example:
        >>> plain("see :class:`~a.B` and ``x_i``, *not* a * b")
        'see B and x_i, not a * b'
    """
    return MARKUP.sub(lambda m: m["emphasis"] or (m["code"].rpartition(".")[2] if m["last"] else m["code"]), text)


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return ".inf" if value == float("inf") else str(value)


def _sections(text: str) -> Iterator[tuple[str, bool, str]]:
    """Title, whether all of it is literal, and text of each section."""
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
    """One line for each item: what is indented goes on with it."""
    for item in re.split(r"\n(?=\S)", "\n".join(lines)):
        yield " ".join(re.sub(r"^[-*] ", "", item).split())


def _split(lines: list[str]) -> Iterator[Block]:
    """A paragraph as prose, or, where it is indented or has aligned columns, literal."""
    if any(re.search(r"\S {2,}\S", line) for line in lines):
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
