"""Text that comes from files, made fit for where it goes: a terminal, a cell of a CSV file, Markdown, a message."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Sequence
from typing import Any

# What a terminal obeys instead of showing it, but for the end of a line and the tab: control characters, and marks that
# turn the direction of reading, by which a name can look like another one
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(inf|nan)", re.IGNORECASE)


def printable(text: object) -> str:
    r"""Return a text for a terminal: what this would obey, such as a colour in a name from a file, is shown as a code.

    Example:
        >>> print(printable("clinic \x1b[31mA"))
        clinic \x1b[31mA
    """
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], str(text))


def cell(value: Any) -> Any:
    """Return a value for a cell of a CSV file; an apostrophe goes before text that a spreadsheet would compute.

    Example:
        >>> cell("=HYPERLINK(1)"), cell("-0.5"), cell(-0.5), cell("FedBC")
        ("'=HYPERLINK(1)", '-0.5', -0.5, 'FedBC')
    """
    if not isinstance(value, str):
        return value
    is_computed = value.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(value)
    return "'" * is_computed + printable(value)


def markdown_line(text: str) -> str:
    r"""Return a text for a line of Markdown, in which it makes neither HTML, nor a link, nor another line.

    Example:
        >>> print(markdown_line("<b> [x](y)"))
        &lt;b&gt; [x]\(y)
    """
    return html.escape(printable(text), quote=False).replace("](", r"]\(").replace("\n", " ")


class PrintableRecord(logging.LogRecord):
    """A logged message whose text is :func:`printable`."""

    def getMessage(self) -> str:  # noqa: N802 (logging's name)
        """Return the message."""
        return printable(super().getMessage())


def called(client: int, names: Sequence[str] | None) -> str:
    """Return what messages call a client: its number, and its name if that says more.

    Example:
        >>> called(1, None), called(1, ["Bern", "Oslo"]), called(1, ["0", "1"]), called(-1, ["Bern"])
        ('client 1', "client 1 ('Oslo')", 'client 1', 'client -1')
    """
    name = names[client] if names and client >= 0 else str(client)
    return f"client {client}" if name == str(client) else f"client {client} ({name!r})"


def shorten(names: Sequence[Any], limit: int = 10) -> str:
    """Return a list of the first ``limit`` names, and how many more there are.

    Example:
        >>> shorten(["cat", "dog", "owl"], limit=2)
        'cat, dog and 1 more'
    """
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(map(str, names[:limit])) + more
