"""Runs of one process that train their clients together, bit for bit as each would alone."""

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
from fedbc_lightning.engines.stacked.joint_run import JOINABLE, ApartError, Experience, JointRun, UnlikeError

MAX_ERRORS = 3
"""After so many errors in training as one, of whatever run, it is given up."""


@dataclass
class Request:
    """Local training that a run waits for.

    Attributes:
        run: The local training of the run's cohort.
        start: (d,) or (K, d), the start models.
        lr_scale: Factor on the user's learning rates.
        purpose: What random draws are for.
        seconds: Its share, by steps, of the time that it took; None: it is not done, and the run is to do it itself.
    """

    run: CohortOptimizerRun
    start: Tensor
    lr_scale: float
    purpose: str
    seconds: float | None = None

    @property
    def round(self) -> int:
        """Return the round that the run is in."""
        return self.run.bench.round

    def load(self) -> None:
        """Seed the run's generators, make its loaders, load its start models."""
        self.run.load(self.start, self.purpose)

    def kind(self) -> Any:
        """What must be equal for runs to be trained as one; None: this one cannot be."""
        run, bench = self.run, self.run.bench
        kinds = [type(term) for term in run.terms]
        if run.after_step is not None or len(kinds) > 1 or not set(kinds) <= set(JOINABLE):
            return None
        model = type(bench.user.module), bench.layout.fingerprint()
        steps = run.stacked.optimizer.settings, bench.optimizer.learning_rates, self.lr_scale, run.local
        return model, steps, self.purpose


def _that_fit(group: Sequence[tuple[Member, Request]]) -> Iterator[list[tuple[Member, Request]]]:
    """Parts of a group whose matrices (K, d) fit into the space that one run may take for its own."""
    part: list[tuple[Member, Request]] = []
    num_rows = 0
    for member, request in group:
        own = len(request.run.cohort)
        if part and num_rows + own > request.run.stacked.most_rows:
            yield part
            part, num_rows = [], 0
        part.append((member, request))
        num_rows += own
    yield part


class Lockstep:
    """Runs in threads, of which one works at a time: a run stops where its clients train, until all others are there.

    Then those of one kind and round are trained as one (``joint_run.py``); those that are ahead, after a resume, wait
    for the others. What a run finds in the process's generators, and where it prints, is its own. What ends a run ends
    that one; SIGTERM ends all of them, each at its last finished round.

    Attributes:
        reason: Why the runs are not trained as one; None: they are.
        failed: Why they should not have been before; None: they were rightly.
        ended_by: What ends them all; None: nothing does.
        handed_back: Released by a run whose turn is over.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.ended_by: BaseException | None = None
        self.handed_back = threading.Semaphore(0)
        self.failed: ConfigurationError | None = None
        self._experience = Experience()
        self._num_joined = self._num_errors = 0

    def run(self, jobs: Sequence[Callable[[Member], None]]) -> None:
        """Do all of them; to be called in the main thread.

        Raises:
            SystemExit: SIGTERM came; the runs have ended before.
        """
        members = [Member(self, job) for job in jobs]
        before = signal.signal(signal.SIGTERM, self._end)
        try:
            for member in members:
                self._let(member)
            while waiting := [(member, member.request) for member in members if member.request is not None]:
                first = min(request.round for _, request in waiting)
                now = [(member, request) for member, request in waiting if request.round == first]
                self._train(now)
                for member, _ in now:
                    self._let(member)
        finally:
            signal.signal(signal.SIGTERM, before)
        if self.ended_by is not None:
            raise self.ended_by

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = SystemExit(143)

    def _let(self, member: Member) -> None:
        """Let a run work until it waits again, or ends."""
        member.go_on()
        self.handed_back.acquire()

    def _train(self, waiting: Sequence[tuple[Member, Request]]) -> None:
        """Train what these runs wait for, those of one kind as one."""
        kinds: list[tuple[Any, list[tuple[Member, Request]]]] = []
        for member, request in waiting:
            kind = request.kind()
            same = next((found for other, found in kinds if kind is not None and kind == other), None)
            if same is None:
                kinds.append((kind, same := []))
            same.append((member, request))
        for _, group in kinds:
            for part in _that_fit(group):
                if len(part) > 1 and self.reason is None and self.ended_by is None:
                    self._train_as_one(part)

    def _train_as_one(self, group: Sequence[tuple[Member, Request]]) -> None:
        runs = [request.run for _, request in group]
        started = time.perf_counter()
        try:
            for member, request in group:
                request.load()
                member.generators = Generators(request.run.user.device)
            if not can_gather([loader for run in runs for loader in run.loaders]):
                raise ApartError("their data are not tensors in memory, or too large to be joined")
            JointRun(runs, group[0][1].lr_scale, self._experience).train_all()
        except ApartError as error:
            self.reason = str(error)
            if self._num_joined and not isinstance(error, UnlikeError):
                self.failed = ConfigurationError(
                    f"together: {error}, which shows only in round {runs[0].bench.round}, so earlier rounds may have "
                    "other numbers than the run by itself; remove the folders of these runs, and give together: 1."
                )
            return
        except Exception as error:  # what is wrong with a run it meets by itself, too, and ends by it
            self._num_errors += 1
            self.reason = first_line(error) if self._num_errors == MAX_ERRORS else None
            return
        self._num_joined += 1
        steps = [sum(run.cohort.steps) for run in runs]
        for (_, request), own in zip(group, steps, strict=True):
            request.seconds = (time.perf_counter() - started) * own / sum(steps)


class Member:
    """A run of a :class:`Lockstep`, in a thread of its own.

    Args:
        lockstep: The runs that this one belongs to.
        job: The run; gets this, to give it to its engine.

    Attributes:
        request: What it waits for; None: it has ended.
        generators: What it will find when it goes on.
        seconds_elsewhere: For which it has waited for others.
    """

    def __init__(self, lockstep: Lockstep, job: Callable[[Member], None]) -> None:
        self._lockstep, self._job = lockstep, job
        self.request: Request | None = None
        self.generators: Generators | None = None
        self.seconds_elsewhere = 0.0
        self._turn = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._has_said = False

    def go_on(self) -> None:
        """Let it work; the lockstep is told when it waits again or has ended."""
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
        """Train a cohort of the run's, with those of others if that can be; called by its engine.

        Raises:
            SystemExit: The process is to end.
            ConfigurationError: The runs should not have been trained as one.
        """
        if self._lockstep.reason is None:
            request = self.request = Request(run, start, lr_scale, purpose)
            started = time.perf_counter()
            self._wait(run.user.device)
            self.seconds_elsewhere += time.perf_counter() - started - (request.seconds or 0.0)
            if request.seconds is not None:
                return
        self.check()
        if self._lockstep.reason is not None and not self._has_said:
            self._has_said = True
            print(f"Trained apart from the runs beside it: {self._lockstep.reason}.", flush=True)  # into its own log
        run.run(start, lr_scale, purpose)

    def check(self) -> None:
        """Raise before anything is trained if this run must not go on.

        Raises:
            SystemExit: The process is to end.
            ConfigurationError: The runs should not have been trained as one.
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
