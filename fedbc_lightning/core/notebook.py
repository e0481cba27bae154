"""Outputs of a notebook's cell that are updated in place, because a notebook keeps every line that is printed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any


def show_markdown(text: str) -> None:
    """Show text in Markdown as an output of the cell that is running."""
    from IPython.display import Markdown, display

    display(Markdown(text))


class NotebookOutput:
    """One output of the cell that is running: HTML, and plain text for programs that read notebooks."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle

        self._handle: Any = DisplayHandle()
        self._is_shown = False

    def show(self, lines: Sequence[str], share: float | None = None) -> None:
        """Show lines in place of those before.

        Args:
            lines: Lines of text.
            share: Length of the bar before the last line, in [0, 1]; None: no bar.
        """
        bar = "" if share is None else f'<progress value="{share:.4f}" style="width: 12em"></progress> '
        *above, last = [html.escape(line) for line in lines]
        page = "<br>".join([*above, bar + last])
        bundle = {
            "text/html": f'<div style="font-variant-numeric: tabular-nums">{page}</div>',
            "text/plain": "\n".join(lines),
        }
        show = self._handle.update if self._is_shown else self._handle.display
        self._is_shown = True
        show(bundle, raw=True)
