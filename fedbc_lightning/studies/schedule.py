"""Spreads the runs of a study over processes: skips finished ones, resumes broken ones, and reports failures.

Several schedules, also on several machines, may work on one study: a run is locked by the process that does it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol

from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.studies.notes import failure, is_finished, write_note
from fedbc_lightning.studies.study_run import Run
from fedbc_lightning.studies.worker import STOPPED, Elsewhere, Ended, Progress, Task, work

MAX_LOSSES = 2
"""Number of crashes of its process after which a run counts as failed."""
SECONDS_BETWEEN_LOOKS = 2.0
"""Seconds between two looks at the folders of runs that other processes do."""
SECONDS_TO_STOP = 20.0
"""Seconds that busy workers have to write their checkpoint before they are killed."""


@dataclass
class State:
    """The progress of a run.

    Attributes:
        run: The run that this is about.
        status: ``waiting``, ``running``, ``elsewhere`` (another process does it), ``finished`` or ``failed``.
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


class Pool(Protocol):
    """What does the runs of a schedule.

    Attributes:
        by_connection: Map from the connection of each living worker of this process to the worker.
    """

    by_connection: dict[Any, Worker]

    def free(self) -> Worker | None:
        """Return an idle worker of this process, or None."""

    def forget(self, worker: Worker) -> int | None:
        """Forget a worker whose process has died, and return its exit status."""

    def why_it_ended(self) -> str | None:
        """Return why the pool does no more runs, or None as long as it does."""


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

    def why_it_ended(self) -> None:
        """Return None: these processes are started again as often as needed."""


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
    """Gives runs to workers and collects their reports; waits for runs that other processes do.

    Args:
        runs: The runs, in the order in which they are started.
        pool: What does the runs.
        on_change: Function that is called with this schedule after every report, for the progress view.
        since: Seconds since the epoch; a run that failed from then on is not tried again.

    Attributes:
        states: State of each run, in the order of ``runs``.

    Raises:
        ConfigurationError: A run's folder holds another run.
    """

    def __init__(self, runs: Sequence[Run], pool: Pool, on_change: Callable[[Schedule], None], since: float) -> None:
        self.states = [State(run, "finished" if is_finished(run) else "waiting") for run in runs]
        self._pool, self._on_change, self._since = pool, on_change, since
        self._started = self._looked = time.perf_counter()

    def run(self) -> list[State]:
        """Wait until all runs are finished or have failed, and return the states of all."""
        while self._open_ones():
            while (state := self._next()) is not None and (worker := self._pool.free()) is not None:
                state.status, worker.state = "running", state
                with suppress(OSError):  # it has died while it waited; that is found where its reports are awaited
                    worker.connection.send(Task(state.run, self._since))
            self._on_change(self)
            for connection in wait(list(self._pool.by_connection), timeout=1.0):
                self._listen(self._pool.by_connection[connection])
            if time.perf_counter() - self._looked > SECONDS_BETWEEN_LOOKS:
                self._look_elsewhere()
        self._on_change(self)
        return self.states

    def _open_ones(self) -> list[State]:
        return [state for state in self.states if state.status not in ("finished", "failed")]

    def _next(self) -> State | None:
        """Return the next run that waits for a worker, or None."""
        return next((state for state in self.states if state.status == "waiting"), None)

    def _listen(self, worker: Worker) -> None:
        """Take one report: that a round has finished, that a run has ended, or that the process has died."""
        try:
            report = worker.connection.recv()
        except (EOFError, OSError):
            status = self._pool.forget(worker)
            if worker.state is not None:
                self._count_loss(worker.state, status)
            return
        state = worker.state
        assert state is not None
        if isinstance(report, Progress):
            if state.max_rounds is None:
                state.begun = (report.round - 1) / report.max_rounds
            state.round, state.max_rounds = report.round, report.max_rounds
            return
        worker.state = None
        if isinstance(report, Elsewhere):
            state.status = "elsewhere"
            return
        assert isinstance(report, Ended)
        if (
            report.error == STOPPED
        ):  # by a signal that was meant for the worker: a cluster sends one before it takes a job
            state.status = "waiting"
            return
        state.seconds, state.error = report.seconds, report.error
        state.status = "failed" if report.error else "finished"

    def _count_loss(self, state: State, status: int | None) -> None:
        """Try a run once more whose process has died, or note that it has failed."""
        state.losses += 1
        state.status = "waiting" if state.losses < MAX_LOSSES else "failed"
        if state.status == "failed":
            state.error = f"its process ended with status {status} (killed, or out of memory?), {MAX_LOSSES} times"
            with RunLock() as lock:
                if lock.try_take(state.run.folder):
                    write_note(state.run, is_finished=False, error=state.error)

    def _look_elsewhere(self) -> None:
        """See what has become of runs that no worker of this process does, and take over those that nobody does."""
        self._looked = time.perf_counter()
        reason = self._pool.why_it_ended()  # asked first: the pool's last run may end in between
        for state in self._open_ones():
            if state.status == "running":
                continue
            if is_finished(state.run):
                state.status = "finished"
            elif reason is not None:  # what has failed in a pool that had begun before this schedule is told, too
                state.status, state.error = "failed", failure(state.run, since=0.0) or reason
            elif (error := failure(state.run, self._since)) is not None:
                state.status, state.error = "failed", error
            elif state.status == "elsewhere":
                with RunLock() as lock:
                    state.status = "waiting" if lock.try_take(state.run.folder) else "elsewhere"

    @property
    def at_work(self) -> list[State]:
        """States of the runs that are being done, one per busy worker."""
        return [worker.state for worker in self._pool.by_connection.values() if worker.state is not None]

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
