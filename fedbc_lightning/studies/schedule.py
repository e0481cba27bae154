"""Spreads the runs of a study over processes: skips finished ones, resumes broken ones, and reports failures."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import write_text
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.studies.run import Run
from fedbc_lightning.studies.worker import Ended, Progress, Task, work

NOTE = "run.json"
"""File in a run's folder that says which run it is, and whether it has finished without error."""

MAX_LOSSES = 2
"""Number of crashes of its process after which a run counts as failed."""
SECONDS_TO_STOP = 20.0
"""Seconds that busy workers have to write their checkpoint before they are killed."""


@dataclass
class State:
    """The progress of a run.

    Attributes:
        run: The run that this is about.
        status: ``waiting``, ``running``, ``finished`` or ``failed``.
        round: Last round that the run is known to have finished.
        max_rounds: T of the run; None until it has reported a round.
        begun: Fraction of its rounds that had been done when this session started or resumed the run.
        seconds: Seconds that the run took in this session.
        error: Reason why the run failed, or None.
    """

    run: Run
    status: str = "waiting"
    round: int = 0
    max_rounds: int | None = None
    begun: float = 0.0
    seconds: float = 0.0
    error: str | None = None
    losses: int = 0


class Workers:
    """A pool of processes that do runs, kept from one schedule to the next because each takes time to import torch.

    Args:
        count: Largest number of processes.
        threads: Number of torch threads of each process.
        devices: Indices of the GPUs, given to the processes in turn; empty: no GPU is chosen for them.

    Attributes:
        by_connection: Map from the connection of each living worker to the worker.
    """

    def __init__(self, count: int, threads: int, devices: Sequence[int]) -> None:
        self._count, self._threads, self._devices = count, threads, devices
        self._context = multiprocessing.get_context("spawn")  # CUDA and torch's threads do not survive a fork
        self.by_connection: dict[Any, Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes: idle ones at once, busy ones after they have written their last finished round."""
        for worker in self.by_connection.values():
            worker.connection.close()
            if worker.state is not None:
                worker.process.terminate()
        deadline = time.monotonic() + SECONDS_TO_STOP
        for worker in self.by_connection.values():
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()

    def free(self) -> Worker | None:
        """Return an idle worker, a new one if there may be more; None if all are busy."""
        idle = next((worker for worker in self.by_connection.values() if worker.state is None), None)
        if idle is None and len(self.by_connection) < self._count:
            taken = {worker.place for worker in self.by_connection.values()}
            place = next(k for k in range(self._count) if k not in taken)
            device = self._devices[place % len(self._devices)] if self._devices else None
            idle = Worker(self._context, place, self._threads, device)
            self.by_connection[idle.connection] = idle
        return idle

    def forget(self, worker: Worker) -> int | None:
        """Forget a worker whose process has died, and return its exit status."""
        worker.process.join()
        del self.by_connection[worker.connection]
        return worker.process.exitcode


class Worker:
    """A process that runs :func:`~fedbc_lightning.studies.worker.work`.

    Args:
        context: Context of multiprocessing that starts the process.
        place: Index of the worker, from 0 to ``count - 1``.
        threads: Number of torch threads.
        device: Index of the GPU of this worker, or None.

    Attributes:
        state: State of the run that the worker does; None: it is idle.
        connection: End of the pipe to the process.
        process: The process.
    """

    def __init__(self, context: Any, place: int, threads: int, device: int | None) -> None:
        self.place = place
        self.state: State | None = None
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, threads, device), daemon=True)
        with _environment(OMP_NUM_THREADS=str(threads)):  # read when torch is imported
            self.process.start()
        theirs.close()


class Schedule:
    """Gives runs to workers and collects their reports.

    Args:
        runs: The runs, in the order in which they are started.
        workers: The processes that do the runs.
        on_change: Function that is called with this schedule after every report, for the progress view.

    Attributes:
        states: State of each run, in the order of ``runs``.

    Raises:
        ConfigurationError: A run's folder holds another run.
    """

    def __init__(self, runs: Sequence[Run], workers: Workers, on_change: Callable[[Schedule], None]) -> None:
        self.states = [State(run, "finished" if is_finished(run) else "waiting") for run in runs]
        self._workers, self._on_change = workers, on_change
        self._started = time.perf_counter()

    def run(self) -> list[State]:
        """Do all runs that are not finished, and return the states of all."""
        while any(state.status in ("waiting", "running") for state in self.states):
            while (state := self._next()) is not None and (worker := self._workers.free()) is not None:
                worker.state = state
                worker.connection.send(self._start(state))
            self._on_change(self)
            for connection in wait(list(self._workers.by_connection), timeout=1.0):
                self._listen(self._workers.by_connection[connection])
        self._on_change(self)
        return self.states

    def _next(self) -> State | None:
        """Return the next run that waits for a worker, or None."""
        return next((state for state in self.states if state.status == "waiting"), None)

    def _start(self, state: State) -> Task:
        """Prepare a run's folder, and return the task for the worker."""
        state.status = "running"
        folder, words = state.run.folder, state.run.words()
        write_note(state.run, is_finished=False)
        if run_folder.last_checkpoint(folder) is not None:
            words += ["--ckpt_path", "last"]
        else:  # a run that was stopped before its first checkpoint starts again
            for broken in run_folder.run_folders(folder):
                shutil.rmtree(broken)
        return Task(words, folder / "log.txt")

    def _listen(self, worker: Worker) -> None:
        """Take one report: that a round has finished, that a run has ended, or that the process has died."""
        try:
            report = worker.connection.recv()
        except (EOFError, OSError):
            status = self._workers.forget(worker)
            if (state := worker.state) is not None:
                state.losses += 1
                state.status = "waiting" if state.losses < MAX_LOSSES else "failed"
                state.error = f"its process ended with status {status} (killed, or out of memory?), {MAX_LOSSES} times"
            return
        state = worker.state
        assert state is not None
        if isinstance(report, Progress):
            if state.max_rounds is None:
                state.begun = (report.round - 1) / report.max_rounds
            state.round, state.max_rounds = report.round, report.max_rounds
            return
        assert isinstance(report, Ended)
        worker.state = None
        state.seconds, state.error = report.seconds, report.error
        state.status = "failed" if report.error else "finished"
        if not report.error:
            write_note(state.run, is_finished=True)

    @property
    def at_work(self) -> list[State]:
        """States of the runs that are being done, one per busy worker."""
        return [worker.state for worker in self._workers.by_connection.values() if worker.state is not None]

    @property
    def seconds(self) -> float:
        """Seconds since the schedule was made."""
        return time.perf_counter() - self._started


class _environment:  # noqa: N801
    """Sets environment variables for the processes that are started inside the context."""

    def __init__(self, **values: str) -> None:
        self._values = values

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._values}
        os.environ.update(self._values)

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def write_note(run: Run, *, is_finished: bool) -> None:
    """Write into a run's folder which run it is, and whether it has finished without error."""
    run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.folder / NOTE, json.dumps({"is_finished": is_finished, "run": run.identity()}, indent=1))


def is_finished(run: Run) -> bool:
    """Return whether a run has finished without error, as its note says.

    Raises:
        ConfigurationError: The folder holds a run with other settings, whose numbers do not belong to this study.
    """
    path = run.folder / NOTE
    if not path.is_file():
        return False
    there, here = json.loads(path.read_text(encoding="utf-8"))["run"], run.identity()
    for key in dict.fromkeys([*here, *there]):
        if here.get(key) != there.get(key):
            raise ConfigurationError(
                f"{run.title}: '{run.folder}' was begun with {key} {there.get(key, 'not given')}, and now it is "
                f"{here.get(key, 'not given')}. Give the study another name, or remove that folder."
            )
    return has_ended(run.folder)


def has_ended(folder: Path) -> bool:
    """Return whether the note in a folder says that its run has finished, and the run's tables are still there."""
    return json.loads((folder / NOTE).read_text(encoding="utf-8"))["is_finished"] and tables_folder(folder) is not None


def tables_folder(run: Path) -> Path | None:
    """Return the folder with the tables of a run; None if there are none yet."""
    found = [folder for folder in run_folder.run_folders(run) if (folder / "metrics.csv").is_file()]
    return found[-1] if found else None
