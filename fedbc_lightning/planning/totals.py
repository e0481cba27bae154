"""Totals of a run without training it: steps and bytes sent, memory, and disk."""

from __future__ import annotations

import io
import time
from collections import Counter
from typing import Any, NamedTuple

import torch

from fedbc_lightning.callbacks.round_checkpoint import RoundCheckpoint
from fedbc_lightning.core.machine import peak_memory
from fedbc_lightning.federation.federation import Federation, PlannedRound
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.run_checkpoint import run_checkpoint, states_of_users
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
    first = []
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


# Rough sizes in bytes: a value in a table, all metrics with their names in a checkpoint, a tensor without its values
BYTES_OF_VALUE, BYTES_OF_METRICS, BYTES_OF_TENSOR = 18, 600, 400
# Rough numbers of values in a row: of a client's training, of its evaluation, and of a round's metrics
NUM_TRAINED, NUM_EVALUATED, NUM_METRICS = 6, 5, 20


def table_rows_bytes(run: Run, drawn: Drawn, row_bytes: int) -> int:
    """Return the bytes of the clients' tables, which have a row of ``row_bytes`` per batch, at the end of a run."""
    if not row_bytes:
        return 0
    per_client = float(run.datamodule.num_batches().mean()) * row_bytes
    return round_up(drawn.num_touched * (per_client + len(run.federation.declaration.table_names) * BYTES_OF_TENSOR))


def memory(run: Run, drawn: Drawn, tables: int) -> dict[str, int]:
    """Return the bytes that this process held when it trained a cohort, and those that a run adds, by description.

    Args:
        run: Run that has been set up.
        drawn: Totals over its rounds.
        tables: Bytes of the clients' tables.
    """
    federation = run.federation
    memory = {"now, at its peak": peak_memory()}
    num_rows = drawn.num_touched if federation.clients.file_rows is None else 0
    rows = num_rows * federation.clients.row_bytes + tables
    if rows:
        memory["clients' rows, and their copy for the checkpoint"] = 2 * rows
    if run.user.device.type == "cuda":
        memory["on the GPU, at its peak"] = torch.cuda.max_memory_allocated(run.user.device)
    return memory


def disk(run: Run, drawn: Drawn, tables: int, checkpoint_bytes: int, num_evaluations: int) -> dict[str, int]:
    """Return the bytes on disk at the end of the run, by description; those of events are left out.

    Args:
        run: Run that has been set up.
        drawn: Totals over its rounds.
        tables: Bytes of the clients' tables.
        checkpoint_bytes: Size of a checkpoint without rows, from :func:`checkpoint_bytes`.
        num_evaluations: Number of evaluations in the run.
    """
    settings, clients, disk = run.settings, run.federation.clients, dict[str, int]()
    if settings.enable_checkpointing:
        of_client = clients.row_bytes if clients.file_rows is None else clients.file_rows.checksum_bytes
        checkpoint = checkpoint_bytes + BYTES_OF_METRICS + tables + drawn.num_touched * of_client
        disk["last.ckpt"] = checkpoint
        disk["last.ckpt again, while it is written"] = checkpoint
        frozen = sum(p.nbytes for p in run.federation.layout.frozen.large().values())  # only last.ckpt lacks these
        kept = sum(isinstance(callback, RoundCheckpoint) for callback in run.hooks.callbacks)
        if kept:
            disk["checkpoints of chosen rounds"] = kept * (checkpoint + frozen)
    if clients.file_rows is not None:
        disk["clients.bin, at most"] = drawn.num_slots * clients.row_bytes
    num_values = drawn.num_sampled * NUM_TRAINED + num_evaluations * len(run.evaluator.client_ids) * NUM_EVALUATED
    disk["tables, roughly"] = (num_values + (settings.max_rounds + 1) * NUM_METRICS) * BYTES_OF_VALUE
    return disk


def checkpoint_bytes(run: Run) -> int:
    """Return the size of ``last.ckpt`` as it would be now, before any client has rows."""
    # A checkpoint of the real content is serialised, but nothing is kept: tensors, names and callbacks all count.
    sink = _Counting()
    no_rows = dict.fromkeys(run_folder.TABLES, 0)
    torch.save(run_checkpoint(run, states_of_users(run), no_rows, is_last=True), sink)
    return sink.size


class _Counting(io.BytesIO):
    """A file that counts the bytes written to it and keeps none."""

    size = 0

    def write(self, data: Any) -> int:
        """Count the bytes."""
        length = memoryview(data).nbytes
        self.size += length
        return length
