"""Writes a page as HTML with everything in it: no file beside it and no network is needed to read it."""

from __future__ import annotations

import re
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedbc_lightning.report.content import Page

VERDICTS = ("holds", "fails", "open")


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
