"""Three ways to show the progress of a run: a live display on a terminal, plain lines, an output of a notebook."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fedbc_lightning.core.printing import NotebookOutput, stream_handlers
from fedbc_lightning.core.units import duration
from fedbc_lightning.distributed.interrupts import Interrupts

if TYPE_CHECKING:
    from fedbc_lightning.run.trainer_attributes import RunView

UPDATES_PER_SECOND = 5


class View(Protocol):
    """Shows how far a run is, and its last numbers."""

    def show(self, trainer: RunView, numbers: str) -> None:
        """Show the numbers of the round that has just ended."""

    def close(self, last: str) -> None:
        """Show for the last time; ``last`` says how the run ended."""


def make_view(console: Console, trainer: RunView, description: str, seconds_between_lines: float) -> View:
    """Show the description of a run, and return the view that suits what the console is."""
    if console.is_jupyter:
        return NotebookView(description)
    console.print(description, soft_wrap=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalView(console, trainer)
    return PlainView(console, seconds_between_lines)


class PlainView:
    """Prints a line for a round, at most one in some seconds; the first and the last round always have one."""

    def __init__(self, console: Console, seconds_between_lines: float) -> None:
        self._console, self._pause = console, seconds_between_lines
        self._started, self._last_line = time.perf_counter(), 0.0

    def show(self, trainer: RunView, numbers: str) -> None:
        """Print a line, unless the last one is too young."""
        now = time.perf_counter()
        is_at_an_end = trainer.current_round in (0, 1, trainer.max_rounds)
        if is_at_an_end or now - self._last_line >= self._pause:
            self._last_line = now
            where = f"round {trainer.current_round:>4}/{trainer.max_rounds}"
            self._console.print(f"{where}  {numbers}  {now - self._started:.0f} s", soft_wrap=True)

    def close(self, last: str) -> None:
        """Print how the run ended."""
        self._console.print(last)


class NotebookView:
    """Updates one output of the notebook's cell, because a notebook keeps every line that is printed.

    ``rich.live`` would need ipywidgets there, and its output would not be in the notebook's file.
    """

    def __init__(self, description: str) -> None:
        self._output, self._lines = NotebookOutput(), [*description.splitlines(), "round 0"]
        self._started, self._first_round, self._shown = time.perf_counter(), -1, 0.0
        self._output.show(self._lines, share=0.0)

    def show(self, trainer: RunView, numbers: str) -> None:
        """Show bar, times and numbers; a fast run is not slowed down by its display."""
        now, done = time.perf_counter(), trainer.current_round
        self._first_round = done if self._first_round < 0 else self._first_round
        took, here = now - self._started, done - self._first_round
        left = f", about {duration(took * (trainer.max_rounds - done) / here)} left" if here else ""
        self._lines[-1] = f"round {done}/{trainer.max_rounds} · {duration(took)}{left} · {numbers}"
        if now - self._shown >= 1 / UPDATES_PER_SECOND:
            self._shown = now
            self._output.show(self._lines, share=done / max(1, trainer.max_rounds))

    def close(self, last: str) -> None:
        """Replace the bar by how the run ended."""
        numbers = self._lines[-1].rpartition(" · ")[2]
        self._output.show([*self._lines[:-1], f"{last} · {numbers}"])


class TerminalView:
    """Draws rounds, clients, steps per second and times again and again; what is printed appears above them.

    The thread of ``rich.live`` reads how far local training is, so that a round of minutes moves the bar, too.
    """

    _open: TerminalView | None = None

    def __init__(self, console: Console, trainer: RunView) -> None:
        self._trainer, self._numbers, self._notices = trainer, "", list[str]()
        self._progress = Progress(
            TextColumn("round {task.fields[round]}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[work]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        done = trainer.current_round
        self._rounds = self._progress.add_task("", total=trainer.max_rounds, completed=done, round=done, work="")
        self._steps = self._progress.add_task("", total=None, visible=False, round=0, work="")
        self._streams, self._handlers = (sys.stdout, sys.stderr), list[tuple[logging.StreamHandler, Any]]()
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=UPDATES_PER_SECOND,
            redirect_stderr=sys.stderr.isatty(),  # a file that takes the errors goes on to take them
        )
        self._live.start(refresh=True)
        TerminalView._open = self
        Interrupts.show_by(self._notices.append)  # a signal's handler may only keep what it has to say
        # Loggers keep the stream that they were made with; their lines would be torn by the next drawing.
        replaced = dict(zip(self._streams, (sys.stdout, sys.stderr), strict=True))
        for handler in stream_handlers():
            stream = replaced.get(handler.stream)
            if stream is not None and stream is not handler.stream:
                self._handlers.append((handler, handler.setStream(stream)))

    def show(self, trainer: RunView, numbers: str) -> None:
        """Show the numbers from the next drawing on."""
        self._numbers = numbers

    def close(self, last: str) -> None:
        """Draw for the last time, leave the terminal as it was, and print how the run ended."""
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._live.stop()
        Interrupts.show_by(None)
        TerminalView._open = None
        self._live.console.print(last)

    def leave(self) -> None:
        """Let a forked process print by itself: this one's thread, and who holds its locks, are not in it."""
        sys.stdout, sys.stderr = self._streams
        for handler, stream in self._handlers:
            handler.stream = stream

    def _render(self) -> Group:
        trainer, work = self._trainer, self._trainer.federation.bench.work
        done, said = float(trainer.finished_round), ""
        if trainer.current_round > trainer.finished_round:
            done += work.fraction
            of_all = f" ×{trainer.world_size}" if trainer.world_size > 1 else ""
            said = f"client {work.num_begun}/{work.num_clients}{of_all}  "
        self._progress.update(self._steps, completed=work.num_steps)
        speed = self._progress.tasks[self._steps].speed
        if speed:
            said += f"{speed:,.0f} steps/s" if speed >= 10 else f"{speed:.2g} steps/s"
        self._progress.update(self._rounds, completed=done, round=trainer.current_round, work=said)
        return Group(self._progress, Text(self._numbers), *map(Text, self._notices))


def _leave_in_child() -> None:
    if TerminalView._open is not None:
        TerminalView._open.leave()
        TerminalView._open = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)
