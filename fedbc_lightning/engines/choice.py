"""Which engine a run gets: the one that was asked for, or for ``auto`` the faster of the two on the run's own steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.cohort import Cohort
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.seeding import preserved_globals

if TYPE_CHECKING:
    from fedbc_lightning.algorithms import FederatedAlgorithm

Kind = Literal["sequential", "vectorized"]

TIMED_STEPS = 6
SLOW_STEP = 1.0
"""Seconds: a step that takes longer is timed once."""


def make_engine(kind: Kind, *args: Any) -> SequentialEngine:
    """The engine; the arguments are those of :class:`~fedbc_lightning.engines.sequential.SequentialEngine`."""
    if kind == "vectorized":
        from fedbc_lightning.engines.vectorized import VectorizedEngine  # torch.func takes its time to import

        return VectorizedEngine(*args)
    return SequentialEngine(*args)


def choose(args: Sequence[Any], algorithm: FederatedAlgorithm, ids: Sequence[int], steps: Sequence[int]) -> Kind:
    """The engine that trains these clients sooner; says which and why.

    Both take a few steps of the run's own clients, of which nothing remains: no number of the run depends on it but
    through the engine that is chosen, to about 1e-7 of the weights.

    Args:
        args: Of the engines.
        algorithm: The method.
        ids: Clients that one process trains in a round.
        steps: Of each, in a round.
    """
    try:
        engine = make_engine("vectorized", *args)
        engine.is_trial = True
        algorithm.check(engine)
        algorithm.server_callbacks(engine)
        if len(ids) < 2:
            raise ConfigurationError(
                "has nothing to map: one process trains one client in a round; use engine: sequential."
            )
        with preserved_globals(engine.user.device):
            seconds = Trial(engine).run(ids, steps)
    except ConfigurationError as error:
        reason = str(error).removeprefix("trainer.engine: vectorized ").removesuffix("; use engine: sequential.")
        rank_zero_info(f"trainer.engine: auto takes sequential; vectorized {reason}.")
        return "sequential"
    kind: Kind = min(seconds, key=seconds.__getitem__)
    rank_zero_info(
        f"trainer.engine: auto takes {kind}: the {len(ids)} clients of a round would train for about "
        f"{seconds['sequential']:.2g} s one after another, {seconds['vectorized']:.2g} s together."
    )
    return kind


class Trial:
    """Times a few steps of both engines.

    Args:
        engine: The vectorized one; with one client it is the sequential one.
    """

    def __init__(self, engine: SequentialEngine) -> None:
        self.engine = engine
        self._start = torch.cat([engine.layout.read(), engine.layout.read_buffers()])

    def run(self, ids: Sequence[int], steps: Sequence[int]) -> dict[Kind, float]:
        """Seconds of a round's local training by each engine, as far as a few steps tell.

        Raises:
            ConfigurationError: The clients' steps cannot be mapped.
        """
        order = sorted(range(len(ids)), key=lambda k: (-steps[k], ids[k]))
        ids, steps = [ids[k] for k in order], [steps[k] for k in order]
        engine, asked = self.engine, self.engine.local
        engine.recorder.record_after = {"single": 2, "mapped": 2}
        cohorts = engine.group(range(len(ids)), steps, ())
        most = max(cohorts, key=len)
        try:
            alone, one = self._costs(ids[:1])
            of_two, two = self._costs(ids[:2])
            of_all, all_of_them = self._costs([ids[k] for k in most]) if len(most) > 2 else (of_two, two)
        finally:
            engine.local = asked
        together = 0.0
        for cohort in cohorts:
            lengths = [steps[k] for k in cohort]
            together += of_all * len(cohort) / len(most)
            for rank, (length, longer) in enumerate(zip(lengths[::-1], [0, *lengths[::-1]], strict=False)):
                width = len(cohort) - rank  # so many clients take the steps from `longer` to `length` together
                step = two + (all_of_them - two) * max(width - 2, 0) / max(len(most) - 2, 1) if width > 1 else one
                together += (length - longer) * step
        return {"sequential": alone * len(ids) + one * sum(steps), "vectorized": together}

    def _costs(self, ids: list[int]) -> tuple[float, float]:
        """Seconds of a cohort beside its steps, and of one step."""
        first = self._seconds(ids, 1)
        if first > SLOW_STEP:
            return 0.0, first
        self._seconds(ids, 3)  # recorded by now
        short = min(self._seconds(ids, 1) for _ in range(2))
        if short > SLOW_STEP:
            return 0.0, short
        long = min(self._seconds(ids, 1 + TIMED_STEPS) for _ in range(2))
        step = max(long - short, 0.0) / TIMED_STEPS
        return max(short - step, 0.0), step

    def _seconds(self, ids: list[int], num_steps: int) -> float:
        engine = self.engine
        engine.local = replace(engine.local, epochs=None, steps=num_steps)
        cohort = Cohort(ids, list(range(len(ids))), [1] * len(ids), None, engine.user.device)  # type: ignore[arg-type]
        cohort.start_counters = engine.layout.read_counters()
        started = time.perf_counter()
        engine.solve(cohort, self._start)
        if engine.user.device.type == "cuda":
            torch.cuda.synchronize(engine.user.device)
        return time.perf_counter() - started
