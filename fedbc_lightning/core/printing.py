"""Where the lines go that are printed or logged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO


def stream_handlers() -> list[logging.StreamHandler]:
    """Return the handlers of all loggers that write to a stream."""
    known = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    found = {handler: None for logger in known for handler in logger.handlers}
    return [handler for handler in found if type(handler) is logging.StreamHandler]


@contextmanager
def printing_to(stream: TextIO) -> Iterator[None]:
    """Send to one stream what is printed, and what loggers write to the standard streams.

    A handler of a logger keeps the stream that it was made with, so it does not follow ``sys.stderr``.
    """
    standard = sys.stdout, sys.stderr
    with ExitStack() as stack:
        for handler in stream_handlers():
            if handler.stream in standard and handler.stream is not stream:
                stack.callback(handler.setStream, handler.setStream(stream))
        stack.enter_context(redirect_stdout(stream))
        stack.enter_context(redirect_stderr(stream))
        yield


@contextmanager
def each_line_once() -> Iterator[None]:
    """Let loggers write each line to streams once: several runs in a row would say the same about their data."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        line = record.getMessage()
        is_new = line not in said
        said.add(line)
        return is_new

    handlers = stream_handlers()
    for handler in handlers:
        handler.addFilter(is_new)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_new)
