"""Times steps of both engines on a run's own clients, and estimates from them how long a round takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.state.cohort import Cohort

Kind = Literal["sequential", "vectorized"]

MAX_SHAPES = 32
"""Largest number of batch sizes on which a step is tried before it is mapped."""

SECONDS_TIMED = 0.05
"""Seconds of one timing: a sequence of steps within an epoch, of 6 steps at least."""
MIN_STEPS = 6
"""Smallest number of steps of one timing."""
TURNS = 5
"""Number of timings; the shortest is used, since other programs of the machine make timings longer only."""
MIN_TURNS = 3
"""Smallest number of timings: a recording's first replays take longer, because they are compared."""
NEVER = {"single": math.inf, "mapped": math.inf}
"""Numbers of steps after which a step is recorded, if none is to be."""
SLOW_STEP = 1.0
"""Seconds above which a step is timed once only."""


class Workload(NamedTuple):
    """The clients that one process trains in a round, and the number of steps of each."""

    ids: list[int]
    steps: list[int]


class Batches(NamedTuple):
    """The batches of K clients, those with the most steps first, as arrays (K,).

    Attributes:
        steps: Number of steps of each client.
        per_epoch: Number of batches of each client in an epoch.
        last: Number of samples in each client's last batch of an epoch if it is not full, else 0.
    """

    steps: np.ndarray
    per_epoch: np.ndarray
    last: np.ndarray

    @property
    def num_odd(self) -> np.ndarray:
        """Number of batches of each client that are not full."""
        return np.where(self.last > 0, self.steps // self.per_epoch, 0)

    def of(self, rows: list[int]) -> Batches:
        """Return the batches of some clients."""
        return Batches(self.steps[rows], self.per_epoch[rows], self.last[rows])

    def stacks(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of clients in the stacks of full batches, step by step, and in stacks of odd batches.

        Example:
            >>> Batches(np.array([4, 2]), np.array([2, 2]), np.array([0, 3])).stacks()
            (array([2, 2, 1, 1]), array([1]))
        """
        active = np.searchsorted(-self.steps, -np.arange(self.steps[0]))
        when = [np.arange(n - 1, steps, n) for steps, n in zip(self.steps, self.per_epoch, strict=True)]
        moments = np.concatenate([some[: len(some) * (last > 0)] for some, last in zip(when, self.last, strict=True)])
        odd = np.stack([moments, np.repeat(self.last, self.num_odd)])
        has_full = active > np.bincount(moments, minlength=len(active))
        return active[has_full], np.unique(odd, axis=1, return_counts=True)[1]


Train = Callable[[BaseEngine, list[int], int], Sequence[int]]
"""Trains the given clients for a number of steps, and returns how many steps each of them took."""


class Cost(NamedTuple):
    """Seconds that a cohort takes apart from its steps, and seconds of one step."""

    overhead: float
    step: float


class Trial:
    """Times a few steps of both engines.

    Args:
        engine: The engine; a vectorized one trains a single client as the sequential engine does.
        train: What is timed; by default plain local training from the initial model.
        is_mapped: Whether to time several clients together as well, for which the engine must be vectorized.
        slow_step: Seconds above which a recorded step is timed once only.
    """

    def __init__(
        self, engine: BaseEngine, train: Train | None = None, *, is_mapped: bool = True,
        slow_step: float = SLOW_STEP,
    ) -> None:  # fmt: skip
        self._engine, self._bench, self._train = engine, engine.bench, train or self._train_plainly
        self._is_mapped, self._slow_step = is_mapped, slow_step
        self._turns, self._seconds_timed = TURNS, SECONDS_TIMED
        self._written: Cost | None = None
        layout = self._bench.layout
        self._start, self._kept = torch.cat([layout.read(), layout.read_buffers()]), layout.read_kept()

    def seconds_as_written(self, workloads: Sequence[Workload]) -> float:
        """Estimate the seconds of a round's local training one after another, if no step is recorded."""
        cost = self._time_as_written(workloads[0].ids[:1])
        clients = sum(len(workload.ids) for workload in workloads)
        steps = sum(sum(workload.steps) for workload in workloads)
        return (clients * cost.overhead + steps * cost.step) / len(workloads)

    def limit(self, seconds: float) -> bool:
        """Let all timings of :meth:`measure` together take about so many seconds; return whether there is time."""
        share = seconds / (3 * 2)  # for one client, two, and many; a few steps and more steps
        self._turns = max(MIN_TURNS, min(TURNS, int(share / SECONDS_TIMED)))
        self._seconds_timed = min(SECONDS_TIMED, share / self._turns)
        return seconds > 0

    def run(self, workloads: Sequence[Workload]) -> dict[Kind, float]:
        """Estimate the seconds of a round's local training by each engine, on average over the workloads.

        Raises:
            NotVectorizableError: The clients' steps cannot be mapped.
        """
        self.measure(workloads)
        predicted = [self.predict(workload) for workload in workloads]
        return {kind: sum(seconds[kind] for seconds in predicted) / len(workloads) for kind in predicted[0]}

    def measure(self, workloads: Sequence[Workload]) -> None:
        """Time clients of the first workload, and check that the clients of all workloads can be mapped.

        Raises:
            NotVectorizableError: The clients' steps cannot be mapped.
        """
        ids, steps = _longest_first(workloads[0])
        engine, bench, asked = self._engine, self._bench, self._bench.local
        bench.recorder.record_after = {"single": 2, "mapped": 2}
        try:
            if engine.has_solver:  # the steps of a solver are not replayed for one client
                bench.recorder.record_after = {"single": math.inf, "mapped": 2}
            if self._is_mapped:  # before timing, which would change the state of a step that has some
                self._check_shapes([client for workload in workloads for client in workload.ids])
            if self._written is None:
                self._time_as_written(ids[:1])
            self._one = self._cost(ids[:1])
            if self._is_mapped:
                most = max(engine.group(range(len(ids)), steps, ()), key=len)
                self._num_many = len(most)
                self._two = self._cost(ids[:2])
                self._many = self._cost([ids[k] for k in most]) if len(most) > 2 else self._two
        finally:
            bench.local = asked

    def predict(self, workload: Workload) -> dict[Kind, float]:
        """Estimate the seconds of a workload's local training by each engine that was timed."""
        ids, steps = _longest_first(workload)
        batches = self._batches(ids, steps)
        num_odd = int(batches.num_odd.sum())
        alone = len(ids) * self._one.overhead + (sum(steps) - num_odd) * self._one.step + num_odd * self.step_as_written
        seconds: dict[Kind, float] = {"sequential": alone}
        if self._is_mapped:
            seconds["vectorized"] = self._together(batches)
        return seconds

    def _batches(self, ids: list[int], steps: list[int]) -> Batches:
        """Return which batches these clients get."""
        datamodule = self._bench.datamodule
        per_epoch = np.maximum(datamodule.num_batches()[ids], 1)
        samples = datamodule.num_samples("train")[ids]
        last = samples - (per_epoch - 1) * datamodule.batch_size  # more than a batch if an odd last one is dropped
        return Batches(np.array(steps), per_epoch, np.where(last < datamodule.batch_size, last, 0))

    def _check_shapes(self, ids: list[int]) -> None:
        """Try a step on each size of batch that occurs: the full size, and the sizes of clients' last batches."""
        bench, datamodule, stacked = self._bench, self._bench.datamodule, self._engine.stacked
        assert stacked is not None
        sizes = datamodule.num_samples("train")
        ids = sorted(ids, key=lambda client: -sizes[client])
        by_size = {int(sizes[client]) % datamodule.batch_size: client for client in ids}  # the smallest client
        w = torch.cat([self._start[: bench.layout.num_parameters], self._kept])[None]
        for client in list(by_size.values())[:MAX_SHAPES]:
            loader = datamodule.client_train_dataloader(client, seed=bench.seed, device=bench.user.device)
            batches = list(loader)
            for raw in (batches[0], batches[-1]):
                batch = bench.user.to_device(raw)
                if isinstance(batch, (list, tuple)) and all(isinstance(part, torch.Tensor) for part in batch):
                    stacked.check_step(w, [part[None] for part in batch])

    def _together(self, batches: Batches) -> float:
        """Estimate the seconds of a round's cohorts, linearly in the number of clients that are mapped together.

        A client that goes on alone costs as much as two, for the path of a mapped step is the same.
        """
        from fedbc_lightning.engines.stacked.cohort_run import FEW  # torch.func takes its time to import

        seconds = 0.0
        for cohort in self._engine.group(range(len(batches.steps)), batches.steps.tolist(), ()):
            seconds += self._many.overhead * len(cohort) / self._num_many
            full, odd = batches.of(cohort).stacks()
            seconds += sum(map(self._mapped, full.tolist()))
            seconds += sum(k * self.step_as_written if k < FEW else self._mapped(k) for k in odd.tolist())
        return seconds

    @property
    def step_as_written(self) -> float:
        """Seconds of a step of one client that is not recorded; known once it was measured."""
        assert self._written is not None
        return self._written.step

    def _mapped(self, width: int) -> float:
        """Return the seconds of a step of so many clients."""
        two, many = self._two.step, self._many.step
        return two + (many - two) * max(width - 2, 0) / max(self._num_many - 2, 1)

    def _time_as_written(self, ids: list[int]) -> Cost:
        """Measure, by a few steps, what a step of one client costs that is not recorded."""
        recorder, before = self._bench.recorder, (self._bench.local, self._turns, self._seconds_timed)
        after = recorder.record_after
        recorder.record_after, self._turns, self._seconds_timed = NEVER, MIN_TURNS, 0.0
        try:
            self._written = self._cost(ids)
        finally:
            recorder.record_after = after
            self._bench.local, self._turns, self._seconds_timed = before
        return self._written

    def _cost(self, ids: list[int]) -> Cost:
        """Measure what it costs to train these clients together."""
        if self._timed(ids, 1)[0] > SLOW_STEP:  # includes the data, which may be made when first asked for
            # Without a recording, which would take one more slow step to be compared.
            self._bench.recorder.record_after = NEVER
            seconds, num_steps = self._timed(ids, 1)
            return Cost(0.0, seconds / num_steps)
        self._timed(ids, 3)  # now the step is recorded, which it is after 2 steps
        short, num_steps = self._timed(ids, 1)
        if short > self._slow_step or num_steps > 1:  # some methods take as many steps as they like
            return Cost(0.0, short / num_steps)
        full = int(self._bench.datamodule.num_batches()[ids].min()) - 2  # an epoch's last batch is a step of its own
        more = max(min(int(self._seconds_timed / short), full), MIN_STEPS)
        turns = [(self._timed(ids, 1)[0], self._timed(ids, 1 + more)[0]) for _ in range(self._turns)]
        short, long = map(min, zip(*turns, strict=True))
        step = max(long - short, 0.0) / more
        return Cost(max(short - step, 0.0), step)

    def _timed(self, ids: list[int], num_steps: int) -> tuple[float, int]:
        """Return the seconds of training these clients together, and the largest number of steps among them."""
        bench = self._bench
        bench.local = replace(bench.local, epochs=None, steps=num_steps)
        started = time.perf_counter()
        steps = self._train(self._engine, ids, num_steps)
        if bench.user.device.type == "cuda":
            torch.cuda.synchronize(bench.user.device)
        return time.perf_counter() - started, max(1, *steps)

    def _train_plainly(self, engine: BaseEngine, ids: list[int], num_steps: int) -> Sequence[int]:
        cohort = Cohort(ids, list(range(len(ids))), [1] * len(ids), None, engine.bench.user.device)  # type: ignore[arg-type]
        cohort.start_counters = engine.layout.read_counters()
        cohort.start_kept = self._kept.expand(len(ids), -1)
        engine.solve(cohort, self._start)
        return cohort.steps


def _longest_first(workload: Workload) -> Workload:
    """Return the workload with the clients that take most steps first."""
    order = sorted(range(len(workload.ids)), key=lambda k: (-workload.steps[k], workload.ids[k]))
    return Workload([workload.ids[k] for k in order], [workload.steps[k] for k in order])
