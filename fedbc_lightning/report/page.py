"""A page: sections of tables, figures, text and code, and its HTML, which needs no other file and no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedbc_lightning.studies.numbers import Rows

VERDICTS = ("holds", "fails", "open")


@dataclass(frozen=True)
class Table:
    """A table whose rows a reader can sort.

    Attributes:
        caption: What the table shows.
        rows: A header, then the rows; a cell in ``**`` is bold.
        is_folded: Whether the table is shown only when the reader opens it, under ``title``.
        title: Short name of a folded table.
        is_text: Whether the cells are words, which are aligned at the left.
    """

    kind: ClassVar[str] = "table"
    caption: str
    rows: Rows
    is_folded: bool = False
    title: str = "Table"
    is_text: bool = False


@dataclass(frozen=True)
class Picture:
    """A drawing.

    Attributes:
        svg: The drawing, as SVG that may stand inside of HTML.
        title: Line above the drawing; empty if it needs none.
        alt: What the drawing shows, for readers who do not see it.
        is_map: Whether its colours stand for numbers, so that a dark page leaves them as they are.
    """

    svg: str
    title: str
    alt: str
    is_map: bool = False


@dataclass(frozen=True)
class Gallery:
    """Drawings of the same kind, which stand beside each other where the screen is wide enough.

    Attributes:
        caption: What the drawings show.
        pictures: The drawings.
        legend: Map from the name of a line to its colour, as ``#rrggbb``.
        size: ``small`` (many to a row), ``medium``, or ``large`` (one to a row).
        is_folded: Whether the gallery is shown only when the reader opens it, under ``title``.
        title: Short name of a folded gallery.
    """

    kind: ClassVar[str] = "gallery"
    caption: str
    pictures: Sequence[Picture]
    legend: dict[str, str] = field(default_factory=dict)
    size: str = "medium"
    is_folded: bool = False
    title: str = "Figures"


@dataclass(frozen=True)
class Text:
    """Paragraphs."""

    kind: ClassVar[str] = "text"
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Code:
    """A command or a file, under a caption; folded, it is shown only when the reader opens it."""

    kind: ClassVar[str] = "code"
    caption: str
    code: str
    is_folded: bool = False


Block = Table | Gallery | Text | Code


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: The heading.
        subtitle: What was run, in a sentence.
        verdict: What came out, in sentences, the most important first.
        notices: What a reader must know before he trusts the numbers: unfinished and failed runs, missing files.
        sections: Map from the headings of the parts of the page to what stands in them; empty parts are left out.
        footer: How the page was made.
    """

    title: str
    subtitle: str
    verdict: Sequence[str]
    notices: Sequence[str]
    sections: dict[str, list[Block]]
    footer: str


def render(page: Page) -> str:
    """Return a page as HTML; all texts are escaped, so that a name from a config is never read as HTML.

    Args:
        page: What the page consists of.
    """
    return _environment().get_template("page.html").render(page=page)


@cache
def _environment() -> Environment:
    loader = PackageLoader("fedbc_lightning.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell": cell, "said": said}
    environment.globals["raw"] = lambda name: Markup(loader.get_source(environment, name)[0])
    environment.globals["svg"] = Markup
    return environment


def cell(text: str) -> Markup:
    """Return the HTML of a table's cell.

    Example:
        >>> print(cell("**83.1 ± 0.2**"), cell("<b>"))
        <strong>83.1 ± 0.2</strong> &lt;b&gt;
    """
    bold = re.fullmatch(r"\*\*(.+)\*\*", text)
    return Markup("<strong>{}</strong>").format(bold[1]) if bold else Markup("{}").format(text)


def said(text: str) -> str:
    """Return the verdict that a cell begins with, or nothing.

    Example:
        >>> said("holds: +2.20"), said("holdsworth")
        ('holds', '')
    """
    first = text.partition(":")[0]
    return first if first in VERDICTS else ""
