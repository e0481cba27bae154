"""The results of all processes in a round, joined so that every process knows the whole round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedbc_lightning.distributed.fabric import gather_objects, sum_over_ranks, travels_along
from fedbc_lightning.server import Sums
from fedbc_lightning.state import ClientStore, WrittenParametersError

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class Trained(NamedTuple):
    """What one process trained in a round.

    Attributes:
        records: The row of each of its clients in ``clients.csv``, with the client's position in the round.
        counters: The largest integer buffers of its clients.
        error: What it found if training wrote a frozen parameter.
    """

    records: list[tuple[int, dict[str, Any]]]
    counters: Tensor
    error: WrittenParametersError | None


def join_processes(
    fabric: Fabric, trained: Trained, clients: ClientStore, sums: Sums
) -> tuple[list[dict[str, Any]], Tensor]:
    """Reduce the sums and exchange what was staged for the clients.

    Args:
        fabric: It connects the processes.
        trained: What this process trained.
        clients: Here the rows are staged that other processes send.
        sums: The sums of this process; afterwards they are those of all.

    Returns:
        The rows of all clients of the round, by their positions in it, and the largest integer buffers.

    Raises:
        WrittenParametersError: On some process a frozen parameter was written.
    """
    records, counters, error = trained
    if fabric.world_size == 1:
        if error is not None:
            raise error
        return _in_order(records), counters
    # Robust rules need every row, so these travel as objects; plain sums are one all_reduce of a flat vector.
    kept = {name: {k: row.cpu() for k, row in rows.items()} for name, rows in sums.kept.items()}
    flat, is_along = sums.flat(), travels_along(fabric)
    payload = (records, clients.export_staged(), counters.cpu(), kept, flat if is_along else None)
    gathered = gather_objects(fabric, error or payload)
    errors = [part for part in gathered if isinstance(part, WrittenParametersError)]
    if errors:
        raise WrittenParametersError(sorted({name for error in errors for name in error.names}))
    # Few numbers travel along with the objects, in the order of ranks on every rank: one message less, and the same
    # bits everywhere.
    sums.load(sum(part[-1] for part in gathered) if is_along else sum_over_ranks(fabric, flat))
    records = []
    for rank, (theirs, staged, their_counters, their_kept, _) in enumerate(gathered):
        records += theirs
        counters = torch.maximum(counters, their_counters.to(counters.device))
        if rank != fabric.global_rank:
            clients.import_staged(staged)
            for name, rows in their_kept.items():
                sums.kept.setdefault(name, {}).update(rows)
    return _in_order(records), counters


def _in_order(records: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [record for _, record in sorted(records, key=lambda item: item[0])]
