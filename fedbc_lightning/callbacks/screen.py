"""The live display of a run on a terminal, and everything else that is printed meanwhile."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from rich.console import Console, ConsoleRenderable
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType

from fedbc_lightning.callbacks.live_lines import LiveLines
from fedbc_lightning.core.printing import stream_handlers
from fedbc_lightning.distributed.interrupts import Interrupts

UPDATES_PER_SECOND = 5


class Screen:
    """Draws lines again and again in a thread of its own; what is printed meanwhile appears above them.

    Args:
        console: Console of a terminal.
        lines: The lines.
    """

    _open: Screen | None = None

    def __init__(self, console: Console, lines: LiveLines) -> None:
        self.lines, self._console = lines, console
        self._streams = sys.stdout, sys.stderr
        self._handlers: list[tuple[logging.StreamHandler, Any]] = []
        self._live = _Resized(
            lines,
            console=console,
            refresh_per_second=UPDATES_PER_SECOND,
            redirect_stderr=sys.stderr.isatty(),  # a file that takes the errors goes on to take them
        )

    def open(self) -> None:
        """Begin to draw."""
        self._live.start(refresh=True)
        Screen._open = self
        Interrupts.show_by(self.lines.notices.append)
        replaced = dict(zip(self._streams, (sys.stdout, sys.stderr), strict=True))
        for handler in stream_handlers():
            stream = replaced.get(handler.stream)
            if stream is not None and stream is not handler.stream:
                self._handlers.append((handler, handler.setStream(stream)))

    def close(self) -> None:
        """Draw the lines for the last time, and leave the terminal as it was."""
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._live.stop()
        Interrupts.show_by(None)
        Screen._open = None
        for notice in self.lines.notices[self.lines.num_noticed :]:  # which came after the last drawing
            self._console.print(notice)

    def leave(self) -> None:
        """Let a forked process print by itself: this one's threads, and who holds their locks, are not in it."""
        sys.stdout, sys.stderr = self._streams
        for handler, stream in self._handlers:
            handler.stream = stream


class _Resized(Live):
    """A live display that leaves nothing behind on a terminal that has become narrower.

    Terminals break the lines that no longer fit (all but a few old ones do), so the last drawing takes more of them
    than rich has counted when it draws anew.
    """

    def __init__(self, lines: LiveLines, **settings: Any) -> None:
        super().__init__(lines, **settings)
        self._lines = lines

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Clear, after rich has cleared as many lines as were drawn, those that breaks have added."""
        added = sum((columns - 1) // self.console.width for columns in self._lines.drawn if columns)
        first, *others = super().process_renderables(renderables)
        return [first, Control(*[(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * added), *others]


def _leave_in_child() -> None:
    if Screen._open is not None:
        Screen._open.leave()
        Screen._open = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)
