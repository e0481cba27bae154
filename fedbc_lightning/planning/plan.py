"""Estimates time, memory, disk and bytes of a run from a few steps of its own clients."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from fedbc_lightning.federation.hook_writes import beginning_again, kept_from_start_hooks
from fedbc_lightning.planning import totals
from fedbc_lightning.planning.timing import RoundTimer, time_evaluation
from fedbc_lightning.run.run import Run
from fedbc_lightning.state.layout import WrittenParametersError


@dataclass
class Plan:
    """The estimated cost of a run; times are rough, from a few steps on a machine that may be busy.

    Attributes:
        algorithm: Usual name of the algorithm.
        model: Name of the module's class.
        engine: Engine that would train.
        device: Device on which was measured.
        num_processes: Number of processes that share the clients; times are for all, measured in one.
        num_parameters: Number of parameters, d.
        num_clients: Number of clients N that train.
        max_rounds: Number of rounds, T.
        clients_per_round: Number of clients that train in a round, mean over the first rounds.
        clients_asked: Number of clients whose work a round asks for.
        steps_per_client: Number of optimizer steps of a client in a round, mean over the first rounds.
        steps_per_round: Number of optimizer steps of all clients of a round, mean over the first rounds.
        num_steps: Number of optimizer steps of all rounds.
        is_counted: Whether steps and bytes were counted over all rounds; else they are extrapolated from the first.
        round_seconds: Seconds of a round without evaluation.
        start_seconds: Seconds from the start to the first round: imports (on the command line), data and set-up.
        evaluation_seconds: Seconds of one evaluation.
        num_evaluations: Number of evaluations, that of the initial model included.
        bytes_up: Bytes that clients send to the server in all rounds.
        bytes_down: Bytes that clients receive from the server in all rounds.
        simulated_seconds: Seconds of all rounds on the simulated clock; None without one.
        memory: Map from a description to bytes of memory of this process.
        disk: Map from a description to bytes on disk at the end of the run.
    """

    algorithm: str
    model: str
    engine: str
    device: str
    num_processes: int
    num_parameters: int
    num_clients: int
    max_rounds: int
    clients_per_round: float
    clients_asked: int
    steps_per_client: float
    steps_per_round: float
    num_steps: int
    is_counted: bool
    round_seconds: float
    start_seconds: float
    evaluation_seconds: float
    num_evaluations: int
    bytes_up: int
    bytes_down: int
    simulated_seconds: float | None
    memory: dict[str, int]
    disk: dict[str, int]

    @property
    def seconds(self) -> float:
        """Seconds of the run with its start-up, without checkpoints."""
        return self.start_seconds + self.training_seconds

    @property
    def training_seconds(self) -> float:
        """Seconds of all rounds and evaluations."""
        return self.max_rounds * self.round_seconds + self.num_evaluations * self.evaluation_seconds


def make_plan(run: Run, *, num_processes: int, started: float) -> Plan:
    """Measure a run that has been set up for ``fit``; the module holds z of round 0 afterwards.

    Args:
        run: Run that has been set up, in one process.
        num_processes: Number of processes that will train.
        started: When the set-up began, by ``time.perf_counter``.

    Raises:
        ConfigurationError: A setting cannot be honoured; ``fit`` would raise the same in its first rounds.
    """
    federation, device = run.federation, run.user.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with kept_from_start_hooks(federation, is_resumed=False):
        for name in ("on_fit_start", "on_train_start"):
            getattr(run.user.module, name)()
    # The steps that are timed may write frozen parameters, such as those of a teacher network.
    frozen = federation.layout.frozen.copies()
    start_seconds = time.perf_counter() - started
    try:
        return _measure(run, num_processes, start_seconds)
    except WrittenParametersError as error:
        with beginning_again(federation, error, frozen, frozen):
            pass
        return _measure(run, num_processes, start_seconds)
    finally:
        federation.layout.frozen.put_back(frozen)


def _measure(run: Run, num_processes: int, start_seconds: float) -> Plan:
    federation, device, settings = run.federation, run.user.device, run.settings
    empty = totals.checkpoint_bytes(run)
    drawn = totals.draw_rounds(federation, settings.max_rounds)
    every = settings.eval_every_n_rounds
    num_evaluations = 1 + -(-settings.max_rounds // every) if every else 0
    evaluation_seconds = time_evaluation(federation, run.evaluator, run.splits, num_processes) if every else 0.0
    timer = RoundTimer(federation, run.seed, num_processes)
    round_seconds = timer.time(drawn.first)
    tables = totals.table_rows_bytes(run, drawn, timer.table_bytes)
    num_trained, steps = sum(len(round.ids) for round in drawn.first), sum(sum(round.steps) for round in drawn.first)
    return Plan(
        algorithm=str(federation.algorithm), model=type(run.user.module).__name__,
        engine=federation.engine_kind, device=str(device), num_processes=num_processes,
        num_parameters=federation.layout.num_parameters, num_clients=len(run.datamodule.training_clients),
        max_rounds=settings.max_rounds, clients_per_round=num_trained / len(drawn.first),
        clients_asked=federation.simulation.num_asked,
        steps_per_client=steps / max(num_trained, 1), steps_per_round=steps / len(drawn.first),
        num_steps=drawn.num_steps, is_counted=drawn.is_counted, round_seconds=round_seconds,
        start_seconds=start_seconds, evaluation_seconds=evaluation_seconds, num_evaluations=num_evaluations,
        bytes_up=drawn.bytes_up, bytes_down=drawn.bytes_down, simulated_seconds=drawn.simulated_seconds,
        memory=totals.memory(run, drawn, tables),
        disk=totals.disk(run, drawn, tables, empty, num_evaluations),
    )  # fmt: skip
