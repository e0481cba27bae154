"""Trains the clients of several runs of one process together; each run gets the bits that it would get alone."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.seeding import Generators
from fedbc_lightning.engines.stacked.cohort_batches import can_gather
from fedbc_lightning.engines.stacked.cohort_optimizer_run import CohortOptimizerRun
from fedbc_lightning.engines.stacked.joint_run import (
    JOINABLE,
    DifferentStepsError,
    JointRun,
    KnownSteps,
    NotJoinableError,
)

MAX_ERRORS = 3
"""Number of errors in joint training, of any runs, after which it is given up."""


@dataclass
class Request:
    """Local training that a run waits for.

    Attributes:
        run: The local training of the run's cohort.
        start: The start models, (d,) or (K, d).
        lr_scale: Factor on the user's learning rates.
        purpose: Name that seeds the random draws.
        seconds: The run's part, by steps, of the seconds of joint training; None if the run must train by itself.
    """

    run: CohortOptimizerRun
    start: Tensor
    lr_scale: float
    purpose: str
    seconds: float | None = None

    @property
    def round(self) -> int:
        """Number of the round that the run is in."""
        return self.run.bench.round

    def load(self) -> None:
        """Seed the generators, make the run's loaders, and load its start models."""
        self.run.load(self.start, self.purpose)

    def kind(self) -> Any:
        """Return what must be equal for runs to be trained as one, or None if this run cannot be joined."""
        run, bench = self.run, self.run.bench
        kinds = [type(term) for term in run.terms]
        if run.after_step is not None or len(kinds) > 1 or not set(kinds) <= set(JOINABLE):
            return None
        model = type(bench.user.module), bench.layout.fingerprint()
        steps = run.stacked.optimizer.settings, bench.optimizer.learning_rates, self.lr_scale, run.local
        return model, steps, self.purpose


def _parts_that_fit(group: Sequence[tuple[LockstepThread, Request]]) -> Iterator[list[tuple[LockstepThread, Request]]]:
    """Yield parts of a group whose matrices (K, d) fit into the memory that a single run may take."""
    part: list[tuple[LockstepThread, Request]] = []
    num_rows = 0
    for thread, request in group:
        own = len(request.run.cohort)
        if part and num_rows + own > request.run.stacked.most_rows:
            yield part
            part, num_rows = [], 0
        part.append((thread, request))
        num_rows += own
    yield part


class Lockstep:
    """Runs several runs in threads, of which one works at a time, and trains their clients together.

    A run stops where its clients train until all other runs have come there. Then the runs of one kind and round are
    trained as one (``joint_run.py``). Runs that are ahead, because they were resumed, wait for the others. Each run has
    its own state of the process's random generators, and its own standard output. An error ends the run that raised it;
    SIGTERM ends all runs, each at its last finished round.

    Attributes:
        reason: The reason why the runs are not trained as one, or None if they are.
        failed: The error of runs that turn out to have been joined wrongly in earlier rounds, or None.
        ended_by: What ends all runs, or None.
        handed_back: Semaphore that a run releases when its turn is over.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.ended_by: BaseException | None = None
        self.handed_back = threading.Semaphore(0)
        self.failed: ConfigurationError | None = None
        self._known_steps = KnownSteps()
        self._num_joined = self._num_errors = 0

    def run(self, jobs: Sequence[Callable[[LockstepThread], None]]) -> None:
        """Do all runs; call this in the main thread.

        Raises:
            SystemExit: SIGTERM has come, and all runs have ended.
        """
        threads = [LockstepThread(self, job) for job in jobs]
        before = signal.signal(signal.SIGTERM, self._end)
        try:
            for thread in threads:
                self._resume(thread)
            while waiting := [(thread, thread.request) for thread in threads if thread.request is not None]:
                first = min(request.round for _, request in waiting)
                now = [(thread, request) for thread, request in waiting if request.round == first]
                self._train(now)
                for thread, _ in now:
                    self._resume(thread)
        finally:
            signal.signal(signal.SIGTERM, before)
        if self.ended_by is not None:
            raise self.ended_by

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = SystemExit(143)

    def _resume(self, thread: LockstepThread) -> None:
        """Let a run work until it waits again, or ends."""
        thread.resume()
        self.handed_back.acquire()

    def _train(self, waiting: Sequence[tuple[LockstepThread, Request]]) -> None:
        """Train what these runs wait for; runs of one kind are trained as one."""
        kinds: list[tuple[Any, list[tuple[LockstepThread, Request]]]] = []
        for thread, request in waiting:
            kind = request.kind()
            same = next((found for other, found in kinds if kind is not None and kind == other), None)
            if same is None:
                kinds.append((kind, same := []))
            same.append((thread, request))
        for _, group in kinds:
            for part in _parts_that_fit(group):
                if len(part) > 1 and self.reason is None and self.ended_by is None:
                    self._train_as_one(part)

    def _train_as_one(self, group: Sequence[tuple[LockstepThread, Request]]) -> None:
        runs = [request.run for _, request in group]
        started = time.perf_counter()
        try:
            for thread, request in group:
                request.load()
                thread.generators = Generators(request.run.user.device)
            if not can_gather([loader for run in runs for loader in run.loaders]):
                raise NotJoinableError("their data are not tensors in memory, or too large to be joined")
            JointRun(runs, group[0][1].lr_scale, self._known_steps).train_all()
        except NotJoinableError as error:
            self.reason = str(error)
            if self._num_joined and not isinstance(error, DifferentStepsError):
                self.failed = ConfigurationError(
                    f"together: {error}, which shows only in round {runs[0].bench.round}, so earlier rounds may have "
                    "other numbers than the run by itself; remove the folders of these runs, and give together: 1."
                )
            return
        except Exception as error:  # each run then trains by itself, and the one at fault ends with its error
            self._num_errors += 1
            self.reason = first_line(error) if self._num_errors == MAX_ERRORS else None
            return
        self._num_joined += 1
        steps = [sum(run.cohort.steps) for run in runs]
        for (_, request), own in zip(group, steps, strict=True):
            request.seconds = (time.perf_counter() - started) * own / sum(steps)


class LockstepThread:
    """A thread of a :class:`Lockstep` that does one run.

    Args:
        lockstep: The lockstep that the run belongs to.
        job: Does the run; it is called with this object, which it gives to the run's engine.

    Attributes:
        request: The local training that the run waits for, or None if it has ended.
        generators: The state of the random generators with which the run continues.
        seconds_waited: Seconds that the run has waited for other runs.
    """

    def __init__(self, lockstep: Lockstep, job: Callable[[LockstepThread], None]) -> None:
        self._lockstep, self._job = lockstep, job
        self.request: Request | None = None
        self.generators: Generators | None = None
        self.seconds_waited = 0.0
        self._turn = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._has_said = False

    def resume(self) -> None:
        """Let the run work; it releases ``handed_back`` when it waits again or has ended."""
        self._turn.release()
        if not self._thread.ident:
            self._thread.start()

    def _work(self) -> None:
        self._turn.acquire()
        self._outside = sys.stdout, sys.stderr
        try:
            if self._lockstep.ended_by is None:
                self._job(self)
        finally:
            self.request = None
            self._lockstep.handed_back.release()

    def train(self, run: CohortOptimizerRun, start: Tensor, lr_scale: float, purpose: str) -> None:
        """Train a cohort of the run, together with those of other runs if possible; its engine calls this.

        Raises:
            SystemExit: The process must end.
            ConfigurationError: The runs were joined wrongly in earlier rounds.
        """
        if self._lockstep.reason is None:
            request = self.request = Request(run, start, lr_scale, purpose)
            started = time.perf_counter()
            self._wait(run.user.device)
            self.seconds_waited += time.perf_counter() - started - (request.seconds or 0.0)
            if request.seconds is not None:
                return
        self.check()
        if self._lockstep.reason is not None and not self._has_said:
            self._has_said = True
            # The run's own log is its standard output.
            print(f"Trained apart from the runs beside it: {self._lockstep.reason}.", flush=True)
        run.run(start, lr_scale, purpose)

    def check(self) -> None:
        """Raise before anything is trained if this run must not go on.

        Raises:
            SystemExit: The process must end.
            ConfigurationError: The runs were joined wrongly in earlier rounds.
        """
        if self._lockstep.ended_by is not None:
            raise self._lockstep.ended_by
        if self._lockstep.failed is not None:
            raise self._lockstep.failed

    def _wait(self, device: torch.device) -> None:
        """Wait until it is this run's turn again."""
        streams, self.generators = (sys.stdout, sys.stderr), Generators(device)
        sys.stdout, sys.stderr = self._outside
        self._lockstep.handed_back.release()
        self._turn.acquire()
        sys.stdout, sys.stderr = streams
        self.generators.restore()
        self.request = None
