"""What a run would take: time, memory, disk and bytes, from a few steps of its own clients."""

from __future__ import annotations

import io
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

import torch

from fedbc_lightning.callbacks.round_checkpoint import RoundCheckpoint
from fedbc_lightning.datasets import num_items
from fedbc_lightning.engines import choice
from fedbc_lightning.engines.sequential import NUM_MATRICES, SequentialEngine
from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.evaluation import Measurement
from fedbc_lightning.federation import NUM_ROUNDS_LOOKED_AT, PlannedRound
from fedbc_lightning.module import step_stage
from fedbc_lightning.participation import deal
from fedbc_lightning.recorder import run_checkpoint, settings, states_of_callbacks
from fedbc_lightning.row_file import NUM_SLOTS
from fedbc_lightning.seeding import derive, seed_globals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedbc_lightning.trainer import FederatedTrainer

SLOW_STEP = 0.1
"""Seconds: a step that takes longer is timed once."""
MAX_TRIAL_SECONDS = 2.0
"""The engine that was not asked for is timed if a step of all clients of a round takes less."""
MAX_ROUND_SECONDS = 3.0
"""The first round is taken as a whole, so long and ``MAX_ROUNDS`` times at most; not if it takes longer."""
MAX_ROUNDS = 10
MAX_DRAW_SECONDS = 2.0
"""So long the rounds are drawn that the run will have; those that remain count like the mean of these."""
MAX_EVALUATION_SECONDS = 1.5
"""So long clients are evaluated, for each split and kind of model; those that remain count by their samples."""
BYTES_OF_VALUE, BYTES_OF_EVENT, BYTES_OF_HISTOGRAM = 18, 70, 1000
"""In tables and TensorBoard's events, roughly."""
BYTES_OF_METRIC, BYTES_OF_TENSOR = 40, 400
"""In a checkpoint: a number with its name, and what a tensor takes beside its values."""


@dataclass
class Plan:
    """What a run would take. Times are rough: from a few steps, on a machine that may be busy.

    Attributes:
        algorithm: Its usual name.
        model: The module's class.
        engine: That would train.
        device: On which was measured.
        num_processes: That share the clients; times are for all of them, measured in one.
        num_parameters: d.
        num_clients: N.
        max_rounds: T.
        clients_per_round: S; like the next two the mean over the first rounds.
        steps_per_client: Optimizer steps of a client that takes part in a round.
        steps_per_round: Of all its clients.
        num_steps: Of all rounds.
        is_counted: Whether all rounds were drawn for the numbers of steps and bytes; else the first ones.
        round_seconds: Engine -> seconds of a round, without evaluation; the other engine, too, if it was timed.
        not_timed: Why the other engine was not timed; empty: it was.
        evaluation_seconds: Of one evaluation.
        num_evaluations: With that of the initial model.
        bytes_up: That clients send in all rounds.
        bytes_down: That they receive.
        memory: What -> bytes of this process.
        disk: What -> bytes at the end.
    """

    algorithm: str
    model: str
    engine: choice.Kind
    device: str
    num_processes: int
    num_parameters: int
    num_clients: int
    max_rounds: int
    clients_per_round: float
    steps_per_client: float
    steps_per_round: float
    num_steps: int
    is_counted: bool
    round_seconds: dict[choice.Kind, float]
    not_timed: str
    evaluation_seconds: float
    num_evaluations: int
    bytes_up: int
    bytes_down: int
    memory: dict[str, int]
    disk: dict[str, int]

    @property
    def seconds(self) -> float:
        """Of the run, without start-up and checkpoints."""
        return self.max_rounds * self.round_seconds[self.engine] + self.num_evaluations * self.evaluation_seconds


def make_plan(trainer: FederatedTrainer, path: Path | None, *, num_processes: int) -> Plan:
    """Measure a trainer that is set up for ``fit``; the module holds z of round 0 afterwards.

    Args:
        trainer: Set up, in one process.
        path: None.
        num_processes: That will train.

    Raises:
        ConfigurationError: What ``fit`` would raise in its first rounds.
    """
    return Planner(trainer, num_processes).plan()


class Drawn(NamedTuple):
    """What the rounds of a run do; ``share`` of them was drawn, the numbers are of all.

    Attributes:
        first: The first rounds.
        num_steps: Of all clients and rounds.
        bytes_up: See :class:`Plan`; likewise ``bytes_down``.
        bytes_down: See there.
        num_sampled: Clients, summed over the rounds.
        num_touched: Clients that take part at least once.
        num_slots: Rows in ``clients.bin`` per declared vector, at most.
        is_counted: Whether all rounds were drawn.
    """

    first: list[PlannedRound]
    num_steps: int
    bytes_up: int
    bytes_down: int
    num_sampled: int
    num_touched: int
    num_slots: int
    is_counted: bool


class Planner:
    """Measures one run; see :func:`make_plan`."""

    def __init__(self, trainer: FederatedTrainer, num_processes: int) -> None:
        self.trainer, self.federation, self.num_processes = trainer, trainer.federation, num_processes
        self.device = trainer.user.device
        tables = trainer.federation.declaration.client_vectors
        self._tables = [name for name, kind in tables.items() if kind == "table"]
        self._table_bytes = self._record_bytes = self._num_metrics = 0
        self._has_whole_round = False

    def plan(self) -> Plan:
        """Everything."""
        trainer, federation = self.trainer, self.federation
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        trainer.hooks.call_callbacks("setup", "fit")
        for name in ("on_fit_start", "on_train_start"):
            getattr(trainer.user.module, name)()
        checkpoint_bytes = self._checkpoint_bytes()
        drawn = self._draw_rounds()
        evaluation_seconds, num_values = self._time_evaluation() if trainer.eval_every_n_rounds else (0.0, 0)
        round_seconds, not_timed = self._time_rounds(drawn.first)
        every, count = trainer.eval_every_n_rounds, len(drawn.first)
        num_evaluations = 1 + -(-trainer.max_rounds // every) if every else 0
        num_trained = sum(len(round.ids) for round in drawn.first)
        steps = sum(sum(round.steps) for round in drawn.first)
        return Plan(
            algorithm=str(federation.algorithm), model=type(trainer.user.module).__name__,
            engine=federation.engine_kind, device=str(self.device), num_processes=self.num_processes,
            num_parameters=trainer.layout.num_parameters, num_clients=trainer.datamodule.num_clients,
            max_rounds=trainer.max_rounds, clients_per_round=num_trained / count,
            steps_per_client=steps / max(num_trained, 1), steps_per_round=steps / count, num_steps=drawn.num_steps,
            is_counted=drawn.is_counted, round_seconds=round_seconds, not_timed=not_timed,
            evaluation_seconds=evaluation_seconds, num_evaluations=num_evaluations,
            bytes_up=drawn.bytes_up, bytes_down=drawn.bytes_down, memory=self._memory(drawn),
            disk=self._disk(drawn, checkpoint_bytes, num_evaluations, num_values),
        )  # fmt: skip

    # what the rounds do

    def _draw_rounds(self) -> Drawn:
        num_rounds, until = self.trainer.max_rounds, time.perf_counter() + MAX_DRAW_SECONDS
        first: list[PlannedRound] = []
        times = Counter[int]()
        steps = up = down = sampled = count = 0
        while count < num_rounds and (count < NUM_ROUNDS_LOOKED_AT or time.perf_counter() < until):
            count += 1
            round = self.federation.plan_round(count)
            if count <= NUM_ROUNDS_LOOKED_AT:
                first.append(round)
            times.update(round.ids)
            steps, sampled = steps + sum(round.steps), sampled + len(round.sampled)
            up, down = up + round.bytes_up, down + round.bytes_down
        touched, slots = len(times), sum(min(number, NUM_SLOTS) for number in times.values())
        more = num_rounds / count
        if count < num_rounds:
            num_clients = self.trainer.datamodule.num_clients
            touched = round_up(num_clients * (1 - (1 - times.total() / count / num_clients) ** num_rounds))
            slots = min(NUM_SLOTS * touched, round_up(times.total() * more))
        steps, up, down, sampled = (round_up(total * more) for total in (steps, up, down, sampled))
        return Drawn(first, steps, up, down, sampled, touched, slots, count == num_rounds)

    # time

    def _time_rounds(self, rounds: Sequence[PlannedRound]) -> tuple[dict[choice.Kind, float], str]:
        """Engine -> seconds of a round; why the other engine has none."""
        federation, kind = self.federation, self.federation.engine_kind
        other: choice.Kind = "sequential" if kind == "vectorized" else "vectorized"
        trained = [(number, round) for number, round in enumerate(rounds, 1) if round.ids]
        if not trained:
            return {kind: 0.0}, "no client of the first rounds trains"
        self._begin(federation.engine, *trained[0])
        shares = [choice.Share(round.ids, round.steps) for _, round in trained]
        trial = choice.Trial(
            federation.engine, self._train, is_mapped=kind == "vectorized" and len(shares[0].ids) > 1,
            slow_step=SLOW_STEP,
        )  # fmt: skip
        trial.measure(shares)
        of_kinds = trial.predict(shares[0])
        predicted = of_kinds.get(kind, of_kinds["sequential"])
        measured = self._take_rounds(trained[0], predicted)
        seconds = self._local_seconds(trial, shares, len(rounds))
        if kind == "sequential":
            found, not_timed = self._try_vectorized(trained[0], shares, len(rounds), seconds)
            seconds |= found
        else:
            not_timed = ""
        seconds.setdefault(kind, seconds["sequential"])  # one client at a time: it is the sequential one
        rest, scale = max(measured - predicted, 0.0), min(measured / predicted, 1.0) if measured and predicted else 1.0
        found = {kind: seconds[kind] * scale + rest}
        return found | ({other: seconds[other] + rest} if other in seconds else {}), not_timed

    def _begin(self, engine: SequentialEngine, number: int, round: PlannedRound) -> None:
        server = self.federation.server
        server.round, server.ids, server.metrics = number, round.ids, {}
        self.trainer.user.shim.set(training=True)
        self.federation.start_round(engine)

    def _train(self, engine: SequentialEngine, ids: list[int], num_steps: int) -> list[int]:
        """The clients' part of a round in so many steps; nothing is kept."""
        federation, server = self.federation, self.federation.server
        cohort = federation.make_cohort(ids, [server.ids.index(client) for client in ids])
        if len(ids) == 1:
            cohort.local = engine.local  # also a second training of its own takes a share of its steps
        federation.algorithm.client_update(engine, cohort, server)
        if self._tables and not self._table_bytes:
            num_batches = int(self.trainer.datamodule.num_batches()[ids].sum())
            self._table_bytes = sum(cohort.staged(name).nbytes for name in self._tables) // num_batches
        return cohort.steps

    def _take_rounds(self, begun: tuple[int, PlannedRound], expected: float) -> float:
        """Seconds of a whole round, which is taken again and again from the initial state; 0: it would take long."""
        federation, measured, until = self.federation, list[float](), time.perf_counter() + MAX_ROUND_SECONDS
        if federation.clients.file_rows is not None and federation.clients.row_bytes:
            return 0.0  # there is no file
        number, _ = begun
        while len(measured) < MAX_ROUNDS and time.perf_counter() + expected < until:
            seed_globals(derive(self.trainer.seed, "round", number), self.device)
            started = time.perf_counter()
            try:
                federation.run_round(number)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                measured.append(time.perf_counter() - started)
                records = federation.server.records
                self._record_bytes = sum(len(str(value)) + 1 for value in records[0].values())
                self._num_metrics += len(federation.server.metrics) + 5 if len(measured) == 1 else 0
            finally:
                federation.rollback()
                federation.load_global()
        self._has_whole_round = bool(measured)
        last = measured[len(measured) // 2 :]  # in the first ones data may be made, and steps are recorded
        return statistics.median(last) if last else 0.0

    def _local_seconds(
        self, trial: choice.Trial, shares: Sequence[choice.Share], num_rounds: int
    ) -> dict[choice.Kind, float]:
        """Engine -> mean seconds of the process that has most to do."""
        totals = dict[choice.Kind, float]()
        for share in shares:
            parts = [
                trial.predict(choice.Share([share.ids[p] for p in part], [share.steps[p] for p in part]))
                for part in deal(share.steps, self.num_processes) if part
            ]  # fmt: skip
            for kind in parts[0]:
                totals[kind] = totals.get(kind, 0.0) + max(part[kind] for part in parts)
        return {kind: total / num_rounds for kind, total in totals.items()}

    def _try_vectorized(
        self, begun: tuple[int, PlannedRound], shares: Sequence[choice.Share], num_rounds: int,
        sequential: dict[choice.Kind, float],
    ) -> tuple[dict[choice.Kind, float], str]:  # fmt: skip
        """What the vectorized engine takes, or why that is not known."""
        federation = self.federation
        if federation.algorithm.trains_pooled:
            return {}, "there is one model, trained on all data"
        steps = sum(sum(share.steps) for share in shares) / sum(len(share.ids) for share in shares)
        if sequential["sequential"] / max(steps, 1) > MAX_TRIAL_SECONDS:
            return {}, "steps are slow"
        try:
            engine = choice.make_trial_engine(federation.engine_args, federation.algorithm, len(shares[0].ids))
            self._begin(engine, *begun)
            trial = choice.Trial(engine, self._train, slow_step=SLOW_STEP)
            trial.measure(shares)
        except ConfigurationError as error:
            return {}, choice.reason_of(error)
        finally:
            federation.algorithm.server_callbacks(federation.engine)  # should it keep them
            federation.load_global()
        both = self._local_seconds(trial, shares, num_rounds)  # in turn, so their ratio is better than either
        return {"vectorized": sequential["sequential"] * both["vectorized"] / max(both["sequential"], 1e-9)}, ""

    def _time_evaluation(self) -> tuple[float, int]:
        """Seconds of an evaluation of the initial model, and how many numbers it gives for each client."""
        trainer, total, num_values, longest = self.trainer, 0.0, 0, 0.0
        models = self.federation.models()
        for split in ("test", "val"):
            stage = step_stage(trainer.user.module, split)
            if stage is None or not trainer.has_split(split):
                continue
            tasks = trainer.evaluator.tasks(split, models)
            sizes, rate = trainer.datamodule.num_samples(split), None
            for which in ("global", "local"):
                mine = [task for task in tasks if task[0] == which and task[1] >= 0]
                if mine:
                    seconds, samples, width = self._evaluate_some(mine, split, stage)
                    rate = seconds / samples if rate is None else rate
                    total += seconds / samples * int(sizes[[client for _, client in mine]].sum())
                    num_values += width
                    self._num_metrics += 3 * width
            pooled = trainer.datamodule.pooled_dataset(split)
            if pooled is not None:
                seconds = (rate or 0.0) * num_items(pooled)
                if seconds < MAX_EVALUATION_SECONDS:
                    started = time.perf_counter()
                    trainer.evaluator.do([("global", -1)], Measurement(split, stage, models, 0))
                    seconds = time.perf_counter() - started
                total, longest = total + seconds, max(longest, seconds)
        splits = [split for split in ("test", "val") if trainer.has_split(split)]
        if total < MAX_EVALUATION_SECONDS and self.federation.engine.mapped_evaluation("test") is not None:
            for _ in range(2):  # the first time it is done one client after another as well
                started = time.perf_counter()
                trainer.evaluator.run(splits, models, 0)
            total = min(total, time.perf_counter() - started)
        self.federation.load_global()
        return max(total / self.num_processes, longest), num_values

    def _evaluate_some(self, tasks: Sequence[tuple[str, int]], split: str, stage: str) -> tuple[float, int, int]:
        """Seconds and samples of the first tasks, and how many numbers each gives."""
        models, sizes = self.federation.models(), self.trainer.datamodule.num_samples(split)
        samples = width = 0
        started = time.perf_counter()
        for task in tasks:
            found = self.trainer.evaluator.do([task], Measurement(split, stage, models, 0))
            samples, width = samples + int(sizes[task[1]]), len(found.get(task, {}))
            if time.perf_counter() - started > MAX_EVALUATION_SECONDS:
                break
        return time.perf_counter() - started, samples, width

    # space

    def _memory(self, drawn: Drawn) -> dict[str, int]:
        """What this process held at its peak, and what a run adds."""
        federation, engine = self.federation, self.federation.engine
        memory = {"now, at its peak": peak_memory()}
        num_rows = drawn.num_touched if federation.clients.file_rows is None else 0
        rows = num_rows * federation.clients.row_bytes + self._bytes_of_tables(drawn)
        if rows:
            memory["clients' rows, and their copy for the checkpoint"] = 2 * rows
        if not self._has_whole_round:
            width = max((len(round.ids) for round in drawn.first), default=0)
            memory["cohort matrices"] = NUM_MATRICES * min(engine.cohort_size, width) * engine.row.nbytes
        if self.device.type == "cuda":
            memory["on the GPU, at its peak"] = torch.cuda.max_memory_allocated(self.device)
        return memory

    def _disk(self, drawn: Drawn, checkpoint_bytes: int, num_evaluations: int, num_values: int) -> dict[str, int]:
        trainer, clients, disk = self.trainer, self.federation.clients, dict[str, int]()
        if trainer.enable_checkpointing:
            checkpoint = checkpoint_bytes + self._num_metrics * BYTES_OF_METRIC + self._bytes_of_tables(drawn)
            if clients.file_rows is None:
                checkpoint += drawn.num_touched * clients.row_bytes
            disk["last.ckpt"] = checkpoint
            disk["last.ckpt again, while it is written"] = checkpoint
            kept = sum(isinstance(callback, RoundCheckpoint) for callback in trainer.hooks.callbacks)
            if kept:
                disk["checkpoints of chosen rounds"] = kept * checkpoint
        if clients.file_rows is not None:
            disk["clients.bin, at most"] = drawn.num_slots * clients.row_bytes
        evaluated = len(trainer.evaluator.client_ids)
        disk["tables, roughly"] = (
            drawn.num_sampled * (self._record_bytes or 6 * BYTES_OF_VALUE)
            + num_evaluations * evaluated * (num_values + 1) * BYTES_OF_VALUE
            + (trainer.max_rounds + 1) * self._num_metrics * BYTES_OF_VALUE
        )
        if trainer.logger_setting is None or trainer.logger_setting is True:
            histograms = num_evaluations * (num_values + len(clients.scalar_names)) * BYTES_OF_HISTOGRAM
            disk["events, roughly"] = trainer.max_rounds * self._num_metrics * BYTES_OF_EVENT + histograms
        return disk

    def _bytes_of_tables(self, drawn: Drawn) -> int:
        """Of all clients' tables, which grow with their data: a row for each batch."""
        num_batches = float(self.trainer.datamodule.num_batches().mean())
        per_client = num_batches * self._table_bytes + len(self._tables) * BYTES_OF_TENSOR
        return round_up(drawn.num_touched * per_client)

    def _checkpoint_bytes(self) -> int:
        """Of ``last.ckpt`` before any client has rows."""
        trainer, sink = self.trainer, _Counting()
        content = run_checkpoint(trainer, settings(trainer), states_of_callbacks(trainer), is_last=True)
        torch.save(content, cast("IO[bytes]", sink))
        return sink.size


class _Counting(io.RawIOBase):
    """Takes bytes and keeps none."""

    size = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Count them."""
        length = memoryview(data).nbytes
        self.size += length
        return length


def round_up(value: float) -> int:
    """The next whole number, forgiving what floating point adds.

    Example:
        >>> round_up(3.0000000001), round_up(3.2)
        (3, 4)
    """
    return -int(-(value - 1e-6) // 1)


def peak_memory() -> int:
    """Bytes that this process held at its peak; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
