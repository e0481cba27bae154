"""Where the lines go that are printed or logged: to a terminal, into a file, or into a notebook's cell."""

from __future__ import annotations

import html
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, TypeVar
from unittest import mock

from rich import console as rich_console
from rich.progress import track
from rich.segment import Segment

from fedbc_lightning.core.text import printable

Item = TypeVar("Item")


class Console(rich_console.Console):
    """Rich's console, which shows what a terminal would obey; see :func:`~fedbc_lightning.core.text.printable`."""

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        """Render an object; the movements of rich itself are marked as such, and stay."""
        for text, style, control in super().render(*args, **kwargs):
            yield Segment(text if control else printable(text), style, control)


def stream_handlers() -> list[logging.StreamHandler]:
    """Return the handlers of all loggers that write to a stream."""
    known = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    found = {handler: None for logger in known for handler in logger.handlers}
    return [handler for handler in found if type(handler) is logging.StreamHandler]


@contextmanager
def printing_to(stream: IO[str]) -> Iterator[None]:
    """Send to one stream what is printed, as :func:`printable`, and what loggers write to the standard streams.

    A handler of a logger keeps the stream that it was made with, so it does not follow ``sys.stderr``.
    """
    standard = sys.stdout, sys.stderr
    before = {handler: handler.stream for handler in stream_handlers()}
    write = stream.write
    for handler, own in before.items():
        if own in standard:
            handler.setStream(stream)
    try:
        with (
            mock.patch.object(stream, "write", lambda text: write(printable(text))),
            redirect_stdout(stream),
            redirect_stderr(stream),
        ):
            yield
    finally:
        # A library that is first imported inside makes its handler there. It would go on writing into a log file that
        # has been closed, so it gets standard error instead.
        for handler in stream_handlers():
            if handler.stream is stream:
                handler.setStream(before.get(handler, standard[1]))


def shown_progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterable[Item]:
    """Iterate over items; a terminal shows a progress bar until the end, and other outputs nothing."""
    console = Console(stderr=True)
    return track(items, description, total, console=console, disable=not console.is_terminal, transient=True)


def show_markdown(text: str) -> None:
    """Show text in Markdown as an output of the cell that is running."""
    from IPython.display import Markdown, display

    display(Markdown(text))


class NotebookOutput:
    """One output of the cell that is running, updated in place: HTML, and plain text for programs that read notebooks.

    A notebook keeps every line that is printed, so that lines of progress would fill it.
    """

    def __init__(self) -> None:
        from IPython import get_ipython
        from IPython.display import DisplayHandle

        session = getattr(getattr(get_ipython(), "display_pub", None), "session", None)
        if session is not None:  # ipykernel drops what a fork shows before it has printed anything
            session.pid = os.getpid()
        self._handle: Any = DisplayHandle()
        self._show = self._handle.display

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
        self._show(bundle, raw=True)
        self._show = self._handle.update
