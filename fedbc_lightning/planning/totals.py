"""Totals of a run without training it: steps and bytes sent, memory, and disk."""

from __future__ import annotations

import io
import resource
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

import torch

from fedbc_lightning.callbacks.round_checkpoint import RoundCheckpoint
from fedbc_lightning.engines.sequential import NUM_MATRICES
from fedbc_lightning.federation.federation import Federation, PlannedRound
from fedbc_lightning.planning.timing import EvaluationTime, WholeRounds
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.run_checkpoint import hyper_parameters, run_checkpoint, states_of_users
from fedbc_lightning.state.file_rows import NUM_SLOTS

NUM_FIRST = 10
"""Number of first rounds whose clients' work is predicted."""
MAX_DRAW_SECONDS = 2.0
"""Time limit for drawing rounds; rounds beyond it are estimated by the mean of those drawn."""


class Drawn(NamedTuple):
    """Totals over all rounds of a run, extrapolated if only some of the rounds were drawn.

    Attributes:
        first: The first rounds, at most ``NUM_FIRST``.
        num_steps: Number of optimizer steps of all clients in all rounds.
        bytes_up: Bytes that clients send to the server in all rounds.
        bytes_down: Bytes that clients receive from the server in all rounds.
        num_sampled: Number of sampled clients, summed over the rounds.
        num_touched: Number of clients that take part at least once.
        num_slots: Largest number of rows in ``clients.bin`` per declared vector.
        simulated_seconds: Simulated seconds of all rounds; None without a simulated clock.
        is_counted: Whether all rounds were drawn, so that the totals are exact.
    """

    first: list[PlannedRound]
    num_steps: int
    bytes_up: int
    bytes_down: int
    num_sampled: int
    num_touched: int
    num_slots: int
    simulated_seconds: float | None
    is_counted: bool


def draw_rounds(federation: Federation, num_rounds: int) -> Drawn:
    """Draw the rounds of a run; all of them if :data:`MAX_DRAW_SECONDS` suffices."""
    until = time.perf_counter() + MAX_DRAW_SECONDS
    first: list[PlannedRound] = []
    times = Counter[int]()
    steps = up = down = sampled = count = 0
    while count < num_rounds and (count < NUM_FIRST or time.perf_counter() < until):
        count += 1
        round = federation.plan_round(count)
        if count <= NUM_FIRST:
            first.append(round)
        times.update(round.ids)
        steps, sampled = steps + sum(round.steps), sampled + len(round.sampled)
        up, down = up + round.bytes_up, down + round.bytes_down
    touched, slots = len(times), sum(min(number, NUM_SLOTS) for number in times.values())
    # The draws of rounds are independent of each other, so those that were drawn stand for all.
    more = num_rounds / count
    simulated = None if round.ended is None else round.ended * more
    if count < num_rounds:
        num_clients = len(federation.participation.clients)
        # A client is in a round with probability p = times / (count * clients), and in none of T rounds with (1 - p)^T.
        touched = round_up(num_clients * (1 - (1 - times.total() / count / num_clients) ** num_rounds))
        slots = min(NUM_SLOTS * touched, round_up(times.total() * more))
    steps, up, down, sampled = (round_up(total * more) for total in (steps, up, down, sampled))
    return Drawn(first, steps, up, down, sampled, touched, slots, simulated, count == num_rounds)


def round_up(value: float) -> int:
    """Round up to a whole number, ignoring an excess below 1e-6, which is a rounding error.

    Example:
        >>> round_up(3.0000000001), round_up(3.2)
        (3, 4)
    """
    return -int(-(value - 1e-6) // 1)


BYTES_OF_VALUE, BYTES_OF_EVENT, BYTES_OF_HISTOGRAM = 18, 70, 1000
"""Rough sizes in bytes: a value in a table, and a value and a histogram in TensorBoard's events."""
BYTES_OF_METRIC, BYTES_OF_TENSOR = 40, 400
"""Rough sizes in bytes in a checkpoint: a number with its name, and a tensor without its values."""


class Space:
    """Estimates the memory and disk use of one run.

    Args:
        run: Run that has been set up, and whose rounds have been measured.
        drawn: Totals over its rounds.
        whole: Measurements of whole rounds.
        table_bytes: Bytes of a row of the clients' tables, which have a row per batch.
    """

    def __init__(self, run: Run, drawn: Drawn, whole: WholeRounds, table_bytes: int) -> None:
        self._run, self._drawn, self._whole = run, drawn, whole
        self._tables = 0
        if table_bytes:
            per_client = float(run.datamodule.num_batches().mean()) * table_bytes
            per_client += len(run.federation.declaration.table_names) * BYTES_OF_TENSOR
            self._tables = round_up(drawn.num_touched * per_client)

    def memory(self) -> dict[str, int]:
        """Return the bytes that this process held at its peak, and those that a run adds, by description."""
        federation, drawn = self._run.federation, self._drawn
        memory = {"now, at its peak": peak_memory()}
        num_rows = drawn.num_touched if federation.clients.file_rows is None else 0
        rows = num_rows * federation.clients.row_bytes + self._tables
        if rows:
            memory["clients' rows, and their copy for the checkpoint"] = 2 * rows
        if not self._whole.seconds:
            width = max((len(round.ids) for round in drawn.first), default=0)
            engine = federation.engine
            memory["cohort matrices"] = NUM_MATRICES * min(engine.cohort_size, width) * engine.bench.row.nbytes
        device = self._run.user.device
        if device.type == "cuda":
            memory["on the GPU, at its peak"] = torch.cuda.max_memory_allocated(device)
        return memory

    def disk(self, checkpoint_bytes: int, evaluation: EvaluationTime, num_evaluations: int) -> dict[str, int]:
        """Return the bytes on disk at the end of the run, by description.

        Args:
            checkpoint_bytes: Size of a checkpoint without rows, from :func:`checkpoint_bytes`.
            evaluation: Measured cost of one evaluation.
            num_evaluations: Number of evaluations in the run.
        """
        run, settings, clients, disk = self._run, self._run.settings, self._run.federation.clients, dict[str, int]()
        num_metrics = evaluation.num_metrics + self._whole.num_metrics
        if settings.enable_checkpointing:
            checkpoint = checkpoint_bytes + num_metrics * BYTES_OF_METRIC + self._tables
            if clients.file_rows is None:
                checkpoint += self._drawn.num_touched * clients.row_bytes
            else:
                checkpoint += self._drawn.num_touched * clients.file_rows.checksum_bytes
            disk["last.ckpt"] = checkpoint
            disk["last.ckpt again, while it is written"] = checkpoint
            frozen = sum(p.nbytes for p in run.federation.layout.frozen.large().values())  # only last.ckpt lacks these
            kept = sum(isinstance(callback, RoundCheckpoint) for callback in run.hooks.callbacks)
            if kept:
                disk["checkpoints of chosen rounds"] = kept * (checkpoint + frozen)
        if clients.file_rows is not None:
            disk["clients.bin, at most"] = self._drawn.num_slots * clients.row_bytes
        evaluated = len(run.evaluator.client_ids)
        disk["tables, roughly"] = (
            self._drawn.num_sampled * (self._whole.record_bytes or 6 * BYTES_OF_VALUE)
            + num_evaluations * evaluated * (evaluation.num_values + 1) * BYTES_OF_VALUE
            + (settings.max_rounds + 1) * num_metrics * BYTES_OF_VALUE
        )
        if settings.logger is None or settings.logger is True:
            every = settings.histogram_every_n_rounds
            num_shown = min(num_evaluations, 2 + settings.max_rounds // every) if every else 0
            histograms = num_shown * (evaluation.num_values + len(clients.scalar_names)) * BYTES_OF_HISTOGRAM
            disk["events, roughly"] = settings.max_rounds * num_metrics * BYTES_OF_EVENT + histograms
        return disk


def checkpoint_bytes(run: Run) -> int:
    """Return the size of ``last.ckpt`` as it would be now, before any client has rows."""
    # A checkpoint of the real content is serialised, but nothing is kept: tensors, names and callbacks all count.
    sink = _Counting()
    no_rows = dict.fromkeys(run_folder.TABLES, 0)
    content = run_checkpoint(run, hyper_parameters(run), states_of_users(run), no_rows, is_last=True)
    torch.save(content, sink)
    return sink.size


class _Counting(io.BytesIO):
    """A file that counts the bytes written to it and keeps none."""

    size = 0

    def write(self, data: Any) -> int:
        """Count the bytes."""
        length = memoryview(data).nbytes
        self.size += length
        return length


def peak_memory() -> int:
    """Return the bytes that this process held at its peak."""
    # Linux counts kibibytes, macOS bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
