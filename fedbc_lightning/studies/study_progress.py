"""Shows a running study: a bar for all of it, the runs that are being done, and the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.progress import BarColumn, Progress, TextColumn

from fedbc_lightning.core.printing import Console, NotebookOutput
from fedbc_lightning.core.units import duration
from fedbc_lightning.studies.study_run import State

SECONDS_BETWEEN_LINES = 15.0


class StudyProgress:
    """Shows a bar on a terminal, and one output that is updated in a notebook.

    Elsewhere it prints a line for each run that ends and a summary now and then.

    Args:
        title: Name of the current stage, e.g. ``tuning``.
        console: Console on which the progress is shown.
        states: States of the runs, as the stage begins.
    """

    def __init__(self, title: str, console: Console, states: Sequence[State]) -> None:
        self._title, self._console, self._states = title, console, states
        self._notebook = NotebookOutput() if console.is_jupyter else None
        description = TextColumn("{task.description}", markup=False)
        self._bar = Progress(BarColumn(30), description, console=console, transient=True)
        self._bar.add_task(title, total=len(states), completed=self._done)  # type: ignore[arg-type]
        # A worker may have failed with a run before this stage asks for it: that is news, too.
        self._open = [state for state in states if state.status != "finished"]
        self._last_line = time.perf_counter()
        self._began: tuple[float, float] | None = None

    def __enter__(self) -> StudyProgress:
        count = len(self._states)
        more = f", {count - len(self._open)} of them done before" if len(self._open) < count else ""
        if self._notebook is None:
            self._say(f"{self._title}: {count} run{'s' * (count != 1)}{more}")
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self) -> None:
        """Update the view from the states of the runs, and print which have ended."""
        task = self._bar.tasks[0]
        self._bar.update(task.id, completed=self._done)
        # The pace counts what each run takes to set up, but neither earlier sessions nor the start of the workers.
        if self._began is None and any(state.status == "running" for state in self._states):
            self._began = self._bar.get_time(), self._done
        lines = [f"{state.run.title} {f'round {state.round}/{state.max_rounds}' if state.max_rounds else 'starting'}"
                 for state in self._states if state.status == "running"]  # fmt: skip
        if self._notebook is not None:
            self._notebook.show([*lines, self._summary()], share=task.percentage / 100 if lines else None)
        elif self._console.is_terminal:
            self._bar.update(task.id, description="\n".join([self._summary(), *lines]))
        elif time.perf_counter() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.perf_counter()
            self._say("; ".join([self._summary(), *lines]))
        for state in [state for state in self._open if not state.is_open]:
            self._open.remove(state)
            if state.status == "failed":
                self._say(f"failed: {state.run.title}: {state.error}", style="red")
            elif self._notebook is None and not self._console.is_terminal:  # else the bar says it
                self._say(f"{len(self._states) - len(self._open)}/{len(self._states)}  {state.run.title}")

    @property
    def _done(self) -> float:
        """Number of runs that are done; one that is being done counts as the fraction of its rounds."""
        return sum(min(1.0, s.round / (s.max_rounds or math.inf)) if s.is_open else 1.0 for s in self._states)

    def _summary(self) -> str:
        counts, bar = [state.status for state in self._states], self._bar.tasks[0]
        failed = f", {counts.count('failed')} failed" if "failed" in counts else ""
        (since, before), done = self._began or (0.0, math.inf), self._done
        seconds = (self._bar.get_time() - since) * (len(counts) - done) / (done - before) if done > before else 0.0
        left = f", about {duration(seconds)} left" if seconds else ""
        ended = f"{self._title}: {counts.count('finished')} of {len(counts)} runs{failed}"
        return f"{ended}, {duration(bar.elapsed or 0.0)}{left}"

    def _say(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
