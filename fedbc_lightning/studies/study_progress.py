"""Shows a running study: one bar for all of it, one for each run that is being done, and the time left."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedbc_lightning.core.printing import NotebookOutput
from fedbc_lightning.core.units import duration
from fedbc_lightning.studies.study_run import State

SECONDS_BETWEEN_LINES = 15.0


class StudyProgress:
    """Shows bars on a terminal, and one output that is updated in a notebook.

    Elsewhere it prints a line for each run that ends and a summary now and then.

    Args:
        title: Name of the current stage, e.g. ``tuning``.
        console: Console on which the progress is shown.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console
        self._notebook = NotebookOutput() if console.is_jupyter else None
        columns = TextColumn("{task.description}", markup=False), BarColumn(30), TextColumn("{task.fields[at]}")
        # Rich estimates the time left from the last 30 seconds by default, and single rounds may take longer.
        self._bars = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True,
                              speed_estimate_period=1e9)  # fmt: skip
        self._tasks: dict[int, TaskID] = {}
        self._reported: set[int] = set()
        self._last_line = time.perf_counter()
        self._whole: TaskID | None = None

    def __enter__(self) -> StudyProgress:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def show(self, states: Sequence[State]) -> None:
        """Update the view from the states of the runs."""
        self._tell_ends(states)
        self._update_bars(states)
        lines = [*(f"{state.run.title} {_rounds(state)}" for state in states if state.status == "running")]
        is_due = time.perf_counter() - self._last_line > SECONDS_BETWEEN_LINES
        if self._notebook is not None:
            share = self._bars.tasks[0].percentage / 100
            self._notebook.show([*lines, self._summary(states)], share=share if lines else None)
        elif is_due and not self._console.is_terminal:
            self._last_line = time.perf_counter()
            self._say("; ".join([self._summary(states), *lines]))

    def _tell_ends(self, states: Sequence[State]) -> None:
        is_quiet = self._console.is_terminal or self._notebook is not None  # there the bars say it
        for k, state in enumerate(states):
            if state.is_open or k in self._reported:
                continue
            self._reported.add(k)
            if state.status == "failed":
                self._say(f"failed: {state.run.title}: {state.error}", style="red")
            elif self._whole is not None and not is_quiet:
                took = f"  {state.seconds:.0f} s" if state.seconds else ""  # none if another command has done it
                self._say(f"{len(self._reported)}/{len(states)}  {state.run.title}{took}")
        if self._whole is None and self._notebook is None:
            more = f", {len(self._reported)} of them done before" if self._reported else ""
            self._say(f"{self._title}: {len(states)} run{'s' * (len(states) != 1)}{more}")

    def _update_bars(self, states: Sequence[State]) -> None:
        """Let the bars say how far the runs are; rounds that were done before this session do not count as its pace."""
        done = sum(state.share for state in states)
        if self._whole is None:
            self._whole = self._bars.add_task(self._title, total=len(states), completed=done, at="")  # type: ignore[arg-type]
        at = f"{sum(not state.is_open for state in states)}/{len(states)} runs"
        self._bars.update(self._whole, completed=done, at=at)
        for k, state in enumerate(states):
            if state.status == "running":
                if k not in self._tasks:
                    self._tasks[k] = self._bars.add_task(f"  {state.run.title}", total=1.0, at="")
                self._bars.update(self._tasks[k], completed=state.share, at=_rounds(state))
            elif k in self._tasks:
                self._bars.remove_task(self._tasks.pop(k))

    def _summary(self, states: Sequence[State]) -> str:
        counts, whole = [state.status for state in states], self._bars.tasks[0]
        failed = f", {counts.count('failed')} failed" if "failed" in counts else ""
        left = f", about {duration(whole.time_remaining)} left" if whole.time_remaining else ""
        done = f"{self._title}: {counts.count('finished')} of {len(counts)} runs{failed}"
        return f"{done}, {duration(whole.elapsed or 0.0)}{left}"

    def _say(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _rounds(state: State) -> str:
    """Return the round that a run has reached."""
    return f"round {state.round}/{state.max_rounds}" if state.max_rounds else "starting"
