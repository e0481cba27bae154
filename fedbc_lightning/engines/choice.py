"""Which engine a run gets: the one that was asked for, or for ``auto`` the faster of the two on the run's own steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import NotVectorizableError
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.layout import WrittenParametersError

if TYPE_CHECKING:
    from fedbc_lightning.algorithms import FederatedAlgorithm
    from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine

Kind = Literal["sequential", "vectorized"]

MAX_SHAPES = 32
"""Largest number of batch sizes on which a step is tried before it is mapped."""

SECONDS_TIMED = 0.05
"""Seconds of one timing: a sequence of steps within an epoch, of 6 steps at least."""
TURNS = 5
"""Number of timings; the median is used."""
SLOW_STEP = 1.0
"""Seconds above which a step is timed once only."""


def make_engine(kind: Kind, bench: Workbench) -> BaseEngine:
    """Return an engine of this kind on a workbench."""
    if kind == "vectorized":
        from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine  # torch.func takes its time to import

        return VectorizedEngine(bench)
    return SequentialEngine(bench)


class Workload(NamedTuple):
    """The clients that one process trains in a round, and the number of steps of each."""

    ids: list[int]
    steps: list[int]


def choose(bench: Workbench, algorithm: FederatedAlgorithm, workloads: Sequence[Workload]) -> Kind:
    """Return the engine that trains these clients sooner, and log which one it is and why.

    Both engines take a few steps of the run's own clients, which leave no trace. The choice changes the run's weights
    by about 1e-7 of their size, because the engines add numbers up in different orders.

    Args:
        bench: The run's workbench.
        algorithm: The method.
        workloads: What this process trains in a few rounds; steps are timed with the clients of the first one.
    """
    num_clients = len(workloads[0].ids)
    try:
        engine = make_trial_engine(bench, algorithm, num_clients)
        with preserved_globals(bench.user.device):
            seconds = Trial(engine).run(workloads)
        if engine.stacked.draws_random_numbers:
            raise NotVectorizableError(
                "would draw what training_step draws, such as dropout, for a whole cohort at once, so that its masks "
                "depended on who is in it"
            )
    except WrittenParametersError as error:
        rank_zero_info(f"trainer.engine: auto takes sequential; training_step writes '{error.names[0]}'.")
        return "sequential"
    except NotVectorizableError as error:
        rank_zero_info(f"trainer.engine: auto takes sequential; vectorized {error.reason}.")
        return "sequential"
    kind: Kind = min(seconds, key=seconds.__getitem__)
    rank_zero_info(
        f"trainer.engine: auto takes {kind}: the {num_clients} clients of a round would train for about "
        f"{seconds['sequential']:.2g} s one after another, {seconds['vectorized']:.2g} s together."
    )
    return kind


def make_trial_engine(bench: Workbench, algorithm: FederatedAlgorithm, num_clients: int) -> VectorizedEngine:
    """Return a vectorized engine that is only tried out, on a workbench with the same rows.

    Raises:
        NotVectorizableError: The vectorized engine cannot train the run's clients.
    """
    from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine

    engine = VectorizedEngine(bench.renewed(is_trial=True))
    algorithm.check(engine)
    algorithm.server_callbacks(engine)
    if num_clients < 2:
        raise NotVectorizableError("has nothing to map: one process trains one client in a round")
    return engine


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
        self._start = torch.cat([self._bench.layout.read(), self._bench.layout.read_buffers()])

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
        seconds: dict[Kind, float] = {"sequential": len(ids) * self._one.overhead + sum(steps) * self._one.step}
        if self._is_mapped:
            seconds["vectorized"] = self._together(steps)
        return seconds

    def _check_shapes(self, ids: list[int]) -> None:
        """Try a step on each size of batch that occurs: the full size, and the sizes of clients' last batches."""
        bench, datamodule, stacked = self._bench, self._bench.datamodule, self._engine.stacked
        assert stacked is not None
        sizes = datamodule.num_samples("train")
        ids = sorted(ids, key=lambda client: -sizes[client])
        by_size = {int(sizes[client]) % datamodule.batch_size: client for client in ids}  # the smallest client
        w = self._start[None, : bench.layout.num_parameters]
        for client in list(by_size.values())[:MAX_SHAPES]:
            loader = datamodule.client_train_dataloader(client, seed=bench.seed, device=bench.user.device)
            batches = list(loader)
            for raw in (batches[0], batches[-1]):
                batch = bench.user.to_device(raw)
                if isinstance(batch, (list, tuple)) and all(isinstance(part, torch.Tensor) for part in batch):
                    stacked.check_step(w, [part[None] for part in batch])

    def _together(self, steps: list[int]) -> float:
        """Estimate the seconds of a round's cohorts, linearly in the number of clients that are mapped together."""
        one, two, many, num_many = self._one, self._two, self._many, self._num_many
        seconds = 0.0
        for cohort in self._engine.group(range(len(steps)), steps, ()):
            lengths = [steps[k] for k in cohort][::-1]
            seconds += many.overhead * len(cohort) / num_many
            for rank, (length, longer) in enumerate(zip(lengths, [0, *lengths], strict=False)):
                width = len(cohort) - rank  # number of clients that take the steps from `longer` to `length` together
                mapped = two.step + (many.step - two.step) * max(width - 2, 0) / max(num_many - 2, 1)
                seconds += (length - longer) * (mapped if width > 1 else one.step)
        return seconds

    def _cost(self, ids: list[int]) -> Cost:
        """Measure what it costs to train these clients together."""
        if self._timed(ids, 1)[0] > SLOW_STEP:  # includes the data, which may be made when first asked for
            # Without a recording, which would take one more slow step to be compared.
            self._bench.recorder.record_after = dict.fromkeys(("single", "mapped"), math.inf)
            seconds, num_steps = self._timed(ids, 1)
            return Cost(0.0, seconds / num_steps)
        self._timed(ids, 3)  # now the step is recorded, which it is after 2 steps
        short, num_steps = self._timed(ids, 1)
        if short > self._slow_step or num_steps > 1:  # some methods take as many steps as they like
            return Cost(0.0, short / num_steps)
        full = int(self._bench.datamodule.num_batches()[ids].min()) - 2  # an epoch's last batch is a step of its own
        more = max(min(int(SECONDS_TIMED / short), full), 6)
        turns = [(self._timed(ids, 1)[0], self._timed(ids, 1 + more)[0]) for _ in range(TURNS)]
        short, long = map(statistics.median, zip(*turns, strict=True))
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
        engine.solve(cohort, self._start)
        return cohort.steps


def _longest_first(workload: Workload) -> Workload:
    """Return the workload with the clients that take most steps first."""
    order = sorted(range(len(workload.ids)), key=lambda k: (-workload.steps[k], workload.ids[k]))
    return Workload([workload.ids[k] for k in order], [workload.steps[k] for k in order])
