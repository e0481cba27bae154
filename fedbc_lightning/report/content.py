"""What a page consists of: sections of tables, galleries of figures, text and code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fedbc_lightning.studies.numbers import Rows


@dataclass(frozen=True)
class Table:
    """A table whose rows a reader can sort.

    Attributes:
        caption: What the table shows, in whole sentences.
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
        caption: What the drawings show, in whole sentences.
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
    """A command or a file, under a sentence that says what it is.

    Attributes:
        caption: What it is.
        code: Its text.
        is_folded: Whether it is shown only when the reader opens it, under the caption.
    """

    kind: ClassVar[str] = "code"
    caption: str
    code: str
    is_folded: bool = False


Block = Table | Gallery | Text | Code


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading.

    Attributes:
        name: Name in links to the section.
        title: The heading.
        blocks: What stands in it.
    """

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: The heading.
        subtitle: What was run, in a sentence.
        verdict: What came out, in sentences, the most important first.
        notices: What a reader must know before he trusts the numbers: unfinished and failed runs, missing files.
        sections: The parts of the page.
        footer: How the page was made.
    """

    title: str
    subtitle: str
    verdict: Sequence[str]
    notices: Sequence[str]
    sections: Sequence[Section]
    footer: str
