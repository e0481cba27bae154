"""Where the lines go that are printed or logged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def stream_handlers() -> list[logging.StreamHandler]:
    """Return the handlers of all loggers that write to a stream."""
    known = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    found = {handler: None for logger in known for handler in logger.handlers}
    return [handler for handler in found if type(handler) is logging.StreamHandler]


@contextmanager
def printing_to(stream: TextIO) -> Iterator[None]:
    """Send to one stream what is printed, and what loggers write to the standard streams.

    A handler of a logger keeps the stream that it was made with, so it does not follow ``sys.stderr``. One that is made
    inside writes to standard error afterwards.
    """
    standard = sys.stdout, sys.stderr
    with ExitStack() as stack:
        own = {handler for handler in stream_handlers() if handler.stream is stream}
        stack.callback(_leave, stream, standard[1], own)
        for handler in stream_handlers():
            if handler.stream in standard and handler.stream is not stream:
                stack.callback(handler.setStream, handler.setStream(stream))
        stack.enter_context(redirect_stdout(stream))
        stack.enter_context(redirect_stderr(stream))
        yield


def _leave(stream: TextIO, error: TextIO, own: Collection[logging.StreamHandler]) -> None:
    """Let handlers that were made while all was printed to a stream write to standard error, except its own ones."""
    # Else a library that is first imported inside would go on writing into a log file that has been closed.
    for handler in stream_handlers():
        if handler.stream is stream and handler not in own:
            handler.setStream(error)


@contextmanager
def each_line_once() -> Iterator[None]:
    """Let loggers write each line to streams once: several runs in a row would say the same about their data."""
    filters = {handler: _Once() for handler in stream_handlers()}
    for handler, once in filters.items():
        handler.addFilter(once)
    try:
        yield
    finally:
        for handler, once in filters.items():
            handler.removeFilter(once)


class _Once(logging.Filter):
    """Passes a line of one level once, and every line with an exception."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[tuple[int, str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.levelno, str(record.msg), str(record.args)
        is_new = line not in self._said or record.exc_info is not None
        self._said.add(line)
        return is_new


def shown_progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterable[Item]:
    """Iterate over items; a terminal shows a progress bar until the end, and other outputs nothing."""
    console = Console(stderr=True)
    return track(items, description, total, console=console, disable=not console.is_terminal, transient=True)
