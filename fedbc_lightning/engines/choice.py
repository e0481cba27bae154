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

SECONDS_TIMED = 0.05
"""Seconds of one timing: a sequence of steps within an epoch, of 6 steps at least."""
TURNS = 5
"""Number of timings; the median is used."""
SLOW_STEP = 1.0
"""Seconds: a step that takes longer is timed once."""


def make_engine(kind: Kind, bench: Workbench) -> BaseEngine:
    """Return an engine of this kind on a workbench."""
    if kind == "vectorized":
        from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine  # torch.func takes its time to import

        return VectorizedEngine(bench)
    return SequentialEngine(bench)


class Share(NamedTuple):
    """What one process trains in a round: clients, and the steps of each."""

    ids: list[int]
    steps: list[int]


def choose(bench: Workbench, algorithm: FederatedAlgorithm, shares: Sequence[Share]) -> Kind:
    """The engine that trains these clients sooner; says which and why.

    Both take a few steps of the run's own clients, of which nothing remains: no number of the run depends on it but
    through the engine that is chosen, to about 1e-7 of the weights.

    Args:
        bench: The run's workbench.
        algorithm: The method.
        shares: Shares of a few rounds; steps are timed with the first one's clients.
    """
    num_clients = len(shares[0].ids)
    try:
        engine = make_trial_engine(bench, algorithm, num_clients)
        with preserved_globals(bench.user.device):
            seconds = Trial(engine).run(shares)
        if engine.stacked.draws:
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
        NotVectorizableError: It cannot train them.
    """
    from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine

    engine = VectorizedEngine(bench.renewed(is_trial=True))
    algorithm.check(engine)
    algorithm.server_callbacks(engine)
    if num_clients < 2:
        raise NotVectorizableError("has nothing to map: one process trains one client in a round")
    return engine


Train = Callable[[BaseEngine, list[int], int], Sequence[int]]
"""Trains clients for so many steps; how many each took."""


class Cost(NamedTuple):
    """Seconds of a cohort beside its steps, and of one step."""

    beside: float
    step: float


class Trial:
    """Times a few steps of both engines.

    Args:
        engine: The vectorized one; with one client it is the sequential one.
        train: What is timed; by default plain local training from the initial model.
        is_mapped: Whether the engine is the vectorized one; else several clients together are not timed.
        slow_step: Seconds: a recorded step that takes longer is timed once.
    """

    def __init__(
        self, engine: BaseEngine, train: Train | None = None, *, is_mapped: bool = True,
        slow_step: float = SLOW_STEP,
    ) -> None:  # fmt: skip
        self._engine, self._bench, self._train = engine, engine.bench, train or self._train_plainly
        self._is_mapped, self._slow_step = is_mapped, slow_step
        self._start = torch.cat([self._bench.layout.read(), self._bench.layout.read_buffers()])

    def run(self, shares: Sequence[Share]) -> dict[Kind, float]:
        """Seconds of a round's local training by each engine, on average over the shares, as far as a few steps tell.

        Raises:
            NotVectorizableError: The clients' steps cannot be mapped.
        """
        self.measure(shares)
        predicted = [self.predict(share) for share in shares]
        return {kind: sum(seconds[kind] for seconds in predicted) / len(shares) for kind in predicted[0]}

    def measure(self, shares: Sequence[Share]) -> None:
        """Time clients of the first share; see whether those of all can be mapped.

        Raises:
            NotVectorizableError: The clients' steps cannot be mapped.
        """
        ids, steps = _longest_first(shares[0])
        engine, bench, asked = self._engine, self._bench, self._bench.local
        bench.recorder.record_after = {"single": 2, "mapped": 2}
        try:
            if engine.has_solver:  # one client's own steps are never replayed
                bench.recorder.record_after = {"single": math.inf, "mapped": 2}
            if self._is_mapped:  # before any step is timed, for a step with state would find it changed
                self._check_shapes([client for share in shares for client in share.ids])
            self._one = self._cost(ids[:1])
            if self._is_mapped:
                most = max(engine.group(range(len(ids)), steps, ()), key=len)
                self._num_many = len(most)
                self._two = self._cost(ids[:2])
                self._many = self._cost([ids[k] for k in most]) if len(most) > 2 else self._two
        finally:
            bench.local = asked

    def predict(self, share: Share) -> dict[Kind, float]:
        """Seconds of a share's local training by each engine that was timed."""
        ids, steps = _longest_first(share)
        seconds: dict[Kind, float] = {"sequential": len(ids) * self._one.beside + sum(steps) * self._one.step}
        if self._is_mapped:
            seconds["vectorized"] = self._together(steps)
        return seconds

    def _check_shapes(self, ids: list[int]) -> None:
        """Take a step on each size of a batch: the first of a client, and the last, of which there are several."""
        bench, datamodule, stacked = self._bench, self._bench.datamodule, self._engine.stacked
        assert stacked is not None
        sizes = datamodule.num_samples("train")
        ids = sorted(ids, key=lambda client: -sizes[client])
        by_size = {int(sizes[client]) % datamodule.batch_size: client for client in ids}  # the smallest that has it
        w = self._start[None, : bench.layout.num_parameters]
        for client in list(by_size.values())[:MAX_SHAPES]:
            loader = datamodule.client_train_dataloader(client, seed=bench.seed, device=bench.user.device)
            batches = list(loader)
            for raw in (batches[0], batches[-1]):
                batch = bench.user.to_device(raw)
                if isinstance(batch, (list, tuple)) and all(isinstance(part, torch.Tensor) for part in batch):
                    stacked.check_step(w, [part[None] for part in batch])

    def _together(self, steps: list[int]) -> float:
        """Seconds of the cohorts of a round; a step of any other width costs what lies between."""
        one, two, many, num_many = self._one, self._two, self._many, self._num_many
        seconds = 0.0
        for cohort in self._engine.group(range(len(steps)), steps, ()):
            lengths = [steps[k] for k in cohort][::-1]
            seconds += many.beside * len(cohort) / num_many
            for rank, (length, longer) in enumerate(zip(lengths, [0, *lengths], strict=False)):
                width = len(cohort) - rank  # so many clients take the steps from `longer` to `length` together
                mapped = two.step + (many.step - two.step) * max(width - 2, 0) / max(num_many - 2, 1)
                seconds += (length - longer) * (mapped if width > 1 else one.step)
        return seconds

    def _cost(self, ids: list[int]) -> Cost:
        """What training these together costs."""
        if self._timed(ids, 1)[0] > SLOW_STEP:  # with their data, which may be made when first asked for
            self._bench.recorder.record_after = dict.fromkeys(("single", "mapped"), math.inf)  # that takes a step more
            seconds, num_steps = self._timed(ids, 1)
            return Cost(0.0, seconds / num_steps)
        self._timed(ids, 3)  # recorded by now
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
        """Seconds of training these together, and the steps of the one that took most."""
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


def _longest_first(share: Share) -> Share:
    order = sorted(range(len(share.ids)), key=lambda k: (-share.steps[k], share.ids[k]))
    return Share([share.ids[k] for k in order], [share.steps[k] for k in order])
