"""Shows a running study: one bar for all of it, a line for each worker, and the time left."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedbc_lightning.core.notebook import NotebookOutput
from fedbc_lightning.core.units import duration
from fedbc_lightning.studies.schedule import Schedule, State

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_UPDATES = 0.2


class StudyProgress:
    """Shows a live view on a terminal, and one output that is updated in a notebook.

    Elsewhere it prints a line for each run that ends and a summary now and then.

    Args:
        title: Name of the current stage, e.g. ``tuning``.
        console: Console on which the progress is shown.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._notebook = NotebookOutput() if console.is_jupyter else None
        self._reported: set[int] = set()
        self._last_line = time.perf_counter()
        self._is_new = True

    def __enter__(self) -> StudyProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, schedule: Schedule) -> None:
        """Update the view from the states of the runs."""
        self._tell_ends(schedule)
        if self._live is not None:
            self._live.update(self._view(schedule))
        elif self._notebook is not None:
            self._show_in_notebook(self._notebook, schedule)
        elif time.perf_counter() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.perf_counter()
            running = [f"{state.run.title} {_rounds(state)}" for state in schedule.at_work]
            text = "; ".join([self._summary(schedule), *running])
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show_in_notebook(self, output: NotebookOutput, schedule: Schedule) -> None:
        running = [f"{state.run.title} {_rounds(state)}" for state in schedule.at_work]
        now = time.perf_counter()
        if not running or now - self._last_line > SECONDS_BETWEEN_UPDATES:
            self._last_line = now
            share = sum(map(_share, schedule.states)) / len(schedule.states)
            output.show([*running, self._summary(schedule)], share=share if running else None)

    def _tell_ends(self, schedule: Schedule) -> None:
        if self._is_new and self._notebook is None:
            self._is_new = False
            done = [k for k, state in enumerate(schedule.states) if state.status == "finished"]
            self._reported |= set(done)
            more = f", {len(done)} of them done before" if done else ""
            runs = "1 run" if len(schedule.states) == 1 else f"{len(schedule.states)} runs"
            self._console.print(f"{self._title}: {runs}{more}", highlight=False)
        for k, state in enumerate(schedule.states):
            if state.status in ("finished", "failed") and k not in self._reported:
                self._reported.add(k)
                if state.status == "failed":
                    text = f"failed: {state.run.title}: {state.error}"
                    self._console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
                elif self._live is None and self._notebook is None:
                    text = f"{len(self._reported)}/{len(schedule.states)}  {state.run.title}{_seconds(state)}"
                    self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _view(self, schedule: Schedule) -> Any:
        done = sum(map(_share, schedule.states))
        table = Table.grid(padding=(0, 2))
        for state in schedule.at_work:
            bar = ProgressBar(total=1, completed=_share(state), width=20)
            table.add_row(Text(f"  {state.run.title}"), bar, _rounds(state))
        whole = Table.grid(padding=(0, 2))
        whole.add_row(self._summary(schedule), ProgressBar(total=len(schedule.states), completed=done, width=30))
        return Group(whole, table)

    def _summary(self, schedule: Schedule) -> str:
        counts = [state.status for state in schedule.states]
        failed = f", {counts.count('failed')} failed" if "failed" in counts else ""
        left = seconds_left(schedule)
        others = f", {counts.count('elsewhere')} in other processes" if "elsewhere" in counts else ""
        rest = f", about {duration(left)} left" if left else ""
        done = f"{self._title}: {counts.count('finished')} of {len(counts)} runs{failed}{others}"
        return f"{done}, {duration(schedule.seconds)}{rest}"


def seconds_left(schedule: Schedule) -> float | None:
    """Estimate the seconds that are left from the pace of this session; None if nothing is known yet.

    The work of a run is the fraction of its rounds. Runs and rounds that were done before this session do not count.
    """
    here = [state for state in schedule.states if state.status != "finished" or state.seconds]
    left = sum(1 - _share(state) for state in here)
    done = sum(_share(state) - state.begun for state in here)
    return schedule.seconds * left / done if done > 0 else None


def _share(state: State) -> float:
    if state.status in ("finished", "failed"):
        return 1.0
    return state.round / state.max_rounds if state.max_rounds else 0.0


def _rounds(state: State) -> str:
    """Return the round that a run has reached."""
    return f"round {state.round}/{state.max_rounds}" if state.max_rounds else "starting"


def _seconds(state: State) -> str:
    """Return the seconds that a run took; nothing for one that another process has done."""
    return f"  {state.seconds:.0f} s" if state.seconds else ""
