"""Which engine a run gets: the one that was asked for, or for ``auto`` the one that a rule of its settings names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import NotVectorizableError
from fedbc_lightning.core.recordable import is_promised
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.engines.sequential import SequentialEngine
from fedbc_lightning.engines.stacked.stacked_bench import try_step
from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine
from fedbc_lightning.engines.workbench import Workbench

if TYPE_CHECKING:
    from fedbc_lightning.algorithms import FederatedAlgorithm

Kind = Literal["sequential", "vectorized"]

# Where ``auto`` takes the vectorized engine, by kind of device: the smallest number of clients that a process trains in
# a round, and the largest number of parameters. A kind that was not measured is not among them.
# Measured on a CPU with one thread (benchmarks/engines.py): with 1,000 clients a round of one step each, the mapped
# step of a logistic model (d = 610) is eight times as fast as recorded steps one by one; with ten clients of unequal
# lengths (W1) it takes 1.6 times as long, and with ten MLPs (W2, d = 101,770) 1.2 times.
# Measured on an H100 (benchmarks/gpu.py), clients of equal sizes: 50 CNNs (d = 1.6 million, with dropout) are three
# times as fast as CUDA graphs of one client, 1,000 logistic models 18 times; with ten unequal CNNs it takes longer.
PAYS = {"cpu": (50, 2_000), "cuda": (50, 2_000_000)}


def make_engine(kind: Kind, bench: Workbench, by_rule: bool = False) -> BaseEngine:
    """Return an engine of this kind on a workbench; ``by_rule`` if the user did not choose it."""
    return VectorizedEngine(bench, by_rule) if kind == "vectorized" else SequentialEngine(bench)


def choose(bench: Workbench, algorithm: FederatedAlgorithm, num_clients: int) -> Kind:
    """Return the engine that trains small models on many clients sooner, and log which one it is and why.

    The rule depends on settings, model and data alone, so that a run remains a function of seed and settings: the
    engines add numbers up in different orders, which changes weights by about 1e-7 of their size.

    Args:
        bench: The run's workbench.
        algorithm: The method.
        num_clients: Number of clients that a process trains in a round.
    """
    reason = _why_sequential(bench, algorithm, num_clients)
    kind: Kind = "vectorized" if reason is None else "sequential"
    why = "a small model, many clients, and a promised step" if reason is None else reason
    rank_zero_info(f"trainer.engine: auto takes {kind}: {why}.")
    return kind


def _why_sequential(bench: Workbench, algorithm: FederatedAlgorithm, num_clients: int) -> str | None:
    """Return the first reason against the vectorized engine, or None."""
    num_parameters, kind = len(bench.row), bench.user.device.type
    if algorithm.trains_pooled:
        return "there is one model, trained on all data"
    if bench.local.record_steps is not True and not is_promised(bench.user.module):
        return "training_step is not promised to be a function of weights and batch (fedbc_lightning.recordable)"
    if kind not in PAYS:
        return f"where vectorized pays was measured on {', '.join(PAYS)} alone, not on {kind}; choose it by its name"
    min_clients, max_parameters = PAYS[kind]
    if num_clients < min_clients or num_parameters > max_parameters:
        return (
            f"on a {kind}, vectorized pays for small models on many clients (at most {max_parameters:,} parameters, at "
            f"least {min_clients} clients per process and round), and here are {num_parameters:,} and {num_clients:,}"
        )
    try:
        # On a workbench that has kept nothing, and accepted by the method and its parts
        engine = make_engine("vectorized", bench.renewed())
        algorithm.check(engine)
        algorithm.server_callbacks(engine)
        # What no rule of the settings sees (a sum that is logged, a branch on a value, dropout) shows in one batch.
        try_step(engine.bench)
    except NotVectorizableError as error:
        return f"vectorized {error.reason}"
    return None
