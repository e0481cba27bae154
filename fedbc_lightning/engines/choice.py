"""Which engine a run gets: the one that was asked for, or for ``auto`` the faster of the two on the run's own steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import NotVectorizableError
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.engines.trial import Kind, Trial, Workload
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.state.layout import WrittenParametersError

if TYPE_CHECKING:
    from fedbc_lightning.algorithms import FederatedAlgorithm
    from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine

MARGIN = 0.8
"""Largest fraction of the sequential engine's time with which ``auto`` takes the vectorized engine."""
MAX_SHARE = 0.02
"""Largest fraction of a run's local training that ``auto`` may take to choose; a shorter run is not timed."""
RECORDED_SHARE = 0.4
"""Fraction of the time of a step as written that its replay takes at least."""
SECONDS_OF_RECORDING = 0.8
"""Seconds of a trial with the fewest timings, 0.6 to 0.9: proofs, three recordings, and their first replays."""


def make_engine(kind: Kind, bench: Workbench) -> BaseEngine:
    """Return an engine of this kind on a workbench."""
    if kind == "vectorized":
        from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine  # torch.func takes its time to import

        return VectorizedEngine(bench)
    return SequentialEngine(bench)


def choose(bench: Workbench, algorithm: FederatedAlgorithm, workloads: Sequence[Workload], num_rounds: int) -> Kind:
    """Return the engine that trains these clients sooner, and log which one it is and why.

    Both engines take a few steps of the run's own clients, which leave no trace. The choice changes the run's weights
    by about 1e-7 of their size, because the engines add numbers up in different orders. Therefore it takes the
    vectorized engine only if that is clearly faster, and ``auto`` is not the default: a choice by time would make a run
    no longer a function of seed and settings.

    Args:
        bench: The run's workbench.
        algorithm: The method.
        workloads: What this process trains in a few rounds; steps are timed with the clients of the first one.
        num_rounds: T, the number of rounds of the run.
    """
    num_clients = len(workloads[0].ids)
    try:
        engine = make_trial_engine(bench, algorithm, num_clients)
        trial = Trial(engine)
        with preserved_globals(bench.user.device):
            whole = num_rounds * trial.seconds_as_written(workloads)
            if not trial.limit(MAX_SHARE * RECORDED_SHARE * whole - SECONDS_OF_RECORDING):
                rank_zero_info(
                    f"trainer.engine: auto takes sequential; {num_rounds} rounds of local training take about "
                    f"{whole:.2g} s, and to time both engines might take more than {MAX_SHARE:.0%} of that."
                )
                return "sequential"
            seconds = trial.run(workloads)
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
    return _faster(seconds, num_clients)


def _faster(seconds: Mapping[Kind, float], num_clients: int) -> Kind:
    """Return the vectorized engine if it saves enough, else the sequential one, and log why."""
    kind: Kind = "vectorized" if seconds["vectorized"] <= MARGIN * seconds["sequential"] else "sequential"
    rank_zero_info(
        f"trainer.engine: auto takes {kind}: the {num_clients} clients of a round would train for about "
        f"{seconds['sequential']:.2g} s one after another, {seconds['vectorized']:.2g} s together"
        + ("." if kind == min(seconds, key=seconds.__getitem__) else f"; that is not {1 - MARGIN:.0%} less.")
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
