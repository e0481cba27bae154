"""A page: sections of tables, figures, text and code, and its HTML, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedbc_lightning.cli.overview import version
from fedbc_lightning.studies.numbers import Rows


@dataclass(frozen=True)
class Table:
    """A table whose rows a reader can sort.

    Attributes:
        caption: What the table shows.
        rows: A header, then the rows; a cell in ``**`` is bold.
        fold: Short name under which the reader opens the table; empty: it is always shown.
        is_text: Whether the cells are words, which are aligned at the left.
    """

    caption: str
    rows: Rows
    fold: str = ""
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
        fold: Short name under which the reader opens the gallery; empty: it is always shown.
    """

    caption: str
    pictures: Sequence[Picture]
    legend: dict[str, str] = field(default_factory=dict)
    size: str = "medium"
    fold: str = ""


@dataclass(frozen=True)
class Code:
    """A command or a file; ``fold`` is the short name under which the reader opens it, if it is not always shown."""

    code: str
    fold: str = ""


# A text is a paragraph.
Block = Table | Gallery | Code | str


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: The heading.
        subtitle: What was run, in a sentence.
        verdict: What came out, in sentences, the most important first.
        notices: What a reader must know before he trusts the numbers: unfinished and failed runs, missing files.
        sections: Map from the headings of the parts of the page to what stands in them; empty parts are left out.
    """

    title: str
    subtitle: str
    verdict: Sequence[str]
    notices: Sequence[str]
    sections: dict[str, list[Block]]


def render(page: Page) -> str:
    """Return a page as HTML; all texts are escaped, so that a name from a config is never read as HTML.

    Args:
        page: What the page consists of.
    """
    loader = PackageLoader("fedbc_lightning.pages")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("page.html").render(page=page, version=version())
