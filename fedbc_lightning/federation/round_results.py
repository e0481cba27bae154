"""The results of a round: joined over all processes, the rows in clients.csv, and its metrics."""

from __future__ import annotations

import logging
import math
from collections import Counter
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import MISSING, SIMULATED_SECONDS, Metrics, has_value, train_name
from fedbc_lightning.core.text import shorten
from fedbc_lightning.distributed.fabric import gather_objects, sum_over_ranks
from fedbc_lightning.federation.participation import Participants
from fedbc_lightning.server import Sums
from fedbc_lightning.state import ClientStore, ServerState, WrittenParametersError
from fedbc_lightning.state.declaration import Record, Records

log = logging.getLogger(__name__)


class TrainedShare(NamedTuple):
    """What one process trained in a round.

    Attributes:
        records: The row of each of its clients in ``clients.csv``, with the client's position in the round.
        counters: The largest integer buffers of its clients.
        written: Names of the frozen parameters that training wrote.
    """

    records: list[tuple[int, Record]]
    counters: Tensor
    written: list[str]


def join_processes(fabric: Fabric, share: TrainedShare, clients: ClientStore, sums: Sums) -> tuple[Records, Tensor]:
    """Reduce the sums and exchange what was staged for the clients.

    Args:
        fabric: It connects the processes.
        share: What this process trained.
        clients: Here the rows are staged that other processes send.
        sums: The sums of this process; afterwards they are those of all.

    Returns:
        The rows of all clients of the round, by their positions in it, and the largest integer buffers.

    Raises:
        WrittenParametersError: On some process a frozen parameter was written.
    """
    gathered: list[tuple[TrainedShare, list[Any], dict[str, Any], dict[str, int]]] = [(share, [], {}, {})]
    if fabric.world_size > 1:
        # Robust rules need every row, so these travel as objects; plain sums are one all_reduce of a flat vector.
        kept = {name: {k: row.cpu() for k, row in rows.items()} for name, rows in sums.kept.items()}
        sizes = {name: total.numel() for name, total in sums.totals.items()}
        sent = share._replace(counters=share.counters.cpu())
        gathered = gather_objects(fabric, (sent, clients.export_staged(), kept, sizes))
    written = list(dict.fromkeys(name for theirs, *_ in gathered for name in theirs.written))
    if written:
        raise WrittenParametersError(written)
    # A rank that trained nobody knows neither names nor sizes of the sums.
    if sizes := {name: size for *_, theirs in gathered for name, size in theirs.items()}:
        flat = sum_over_ranks(fabric, torch.cat([sums.total(name, size) for name, size in sizes.items()]))
        sums.totals = dict(zip(sizes, flat.split(list(sizes.values())), strict=True))
    records, counters = list[tuple[int, Record]](), share.counters
    for rank, (theirs, staged, kept, _) in enumerate(gathered):
        records += theirs.records
        counters = torch.maximum(counters, theirs.counters.to(counters.device))
        if rank != fabric.global_rank:
            clients.import_staged(staged)
            for name, rows in kept.items():
                sums.kept.setdefault(name, {}).update(rows)
    return [record for _, record in sorted(records, key=itemgetter(0))], counters


def check_records(
    server: ServerState, algorithm: FederatedAlgorithm, *, hides_participants: bool, needs_loss: bool
) -> None:
    """Say which clients drop out of the round; stop if the method cannot go on without them.

    Args:
        server: The server's state, with the records of the round.
        algorithm: The method.
        hides_participants: Whether nobody may see who took part (``trainer.privacy``): then a round in which nobody is
            left is one without clients, since whether the run goes on must not depend on the only client of a round.
        needs_loss: Whether a round without any loss is a mistake.

    Raises:
        ConfigurationError: No client came out finite, the method cannot do without one that did not, or no client had
            a loss.
    """
    records = server.records
    dropped = [record["client"] for record in records if record["status"] != "ok"]
    is_nobody_left = len(dropped) == len(records) and algorithm.buffer_size is None  # else others are in flight
    who = "all clients" if is_nobody_left else f"client {shorten(dropped)}"
    problem = f"round {server.round}: weights, buffers, state or loss of {who} became NaN or infinite"
    if dropped and (algorithm.needs_all_clients or (is_nobody_left and not hides_participants)):
        raise ConfigurationError(
            f"{problem}, so {algorithm} cannot form z; the state of the round before is kept. Lower the learning rate, "
            "or clip (trainer.gradient_clip_val)."
        )
    if dropped:
        rank_zero_only(log.warning)(f"{problem}; left out of the round (status=nonfinite in clients.csv).")
    lost = [r["client"] for r in server.valid_records if not math.isfinite(r.get("train_loss", 0.0))]
    if lost:
        server.warn_once(
            "loss",
            f"round {server.round}: a loss of client {lost[0]} was NaN or infinite, and its weights stayed finite: it "
            "has its part in the round, and train/loss is no number (said once).",
        )
    if records and not any("train_loss" in record for record in records) and needs_loss:
        raise ConfigurationError(
            f"round {server.round}: training_step returned no loss in any step of any client; is 'return loss' missing?"
        )


def record_missing(server: ServerState, participants: Participants, num_samples: np.ndarray) -> None:
    """Add the rows of the sampled clients that sent nothing, and the simulated seconds of all.

    Args:
        server: The server's state, with the records of the clients that took part.
        participants: The clients that were sampled in the round.
        num_samples: Number of training samples of every client, (N,).
    """
    records = {record["client"]: record for record in server.records}
    for client in participants.sampled:
        if client in participants.missing:  # and an older update of it may have arrived
            records.setdefault(client, _row(client, num_samples, "absent"))["status"] = participants.missing[client]
    server.records = [*records.values()]
    for record in server.records:
        if record["client"] in participants.seconds:
            record["seconds"] = participants.seconds[record["client"]]
    if participants.ended is not None:
        server.log(SIMULATED_SECONDS, participants.ended)


def _row(client: int, num_samples: np.ndarray, status: str) -> Record:
    size = int(num_samples[client])
    return {"client": client, "num_samples": size, "num_steps": 0, "status": status, "weight": 0.0}


def record_bytes(server: ServerState, algorithm: FederatedAlgorithm, down: int, up: int) -> None:
    """Write into each client's row what it received and sent; a client without a message sent nothing."""
    arrived = Counter([arrival.client for arrival in server.arrivals])
    for record in server.records:
        record["bytes_down"] = down if record["status"] != "arrived" else 0
        is_sending = record["status"] in ("ok", "nonfinite")
        record["bytes_up"] = up * (int(is_sending) if algorithm.buffer_size is None else arrived[record["client"]])


def record_arrivals(server: ServerState, num_samples: np.ndarray) -> None:
    """Write the staleness of updates that arrive in the round into their clients' rows.

    A client that arrives and has not started again in the round gets a row with the status ``arrived``. If a client
    arrives twice in a round, the staleness is that of its older update.

    Args:
        server: The server's state, with the records of the clients that have started.
        num_samples: Number of training samples of every client, (N,).
    """
    if not server.arrivals:
        return
    records = {record["client"]: record for record in server.records}
    found = [server.round - 1 - version for _, version in server.arrivals]
    for (client, _), staleness in zip(server.arrivals, found, strict=True):
        if client not in records:
            records[client] = _row(client, num_samples, "arrived")
            server.records.append(records[client])
        records[client].setdefault("staleness", staleness)  # an older update arrives first
    server.log("staleness/mean", sum(found) / len(found))
    server.log("staleness/max", float(max(found)))


def round_metrics(server: ServerState) -> Metrics:
    """Collect the clients' training metrics averaged by samples, what the server's parts log, and the bytes."""
    valid = server.valid_records
    kinds = dict.fromkeys(map(tuple, valid))  # the names of a record; most have the same
    # In the order of first appearance, so that the columns of metrics.csv do not depend on the process.
    names = dict.fromkeys(name for kind in kinds for name in kind if name.startswith("train_"))
    metrics = {}
    for name in names:
        there = [(record[name], record["num_samples"]) for record in valid if name in record]
        having = [(value, size) for value, size in there if has_value(name, value)]
        shown = train_name(name.removeprefix("train_"))
        averaged = having or there  # NaN where nobody has a value
        metrics[shown] = sum([value * size for value, size in averaged]) / sum([size for _, size in averaged])
        if len(having) < len(valid):
            metrics[f"{shown}_num_clients"] = float(len(having))
    count = Counter([record["status"] for record in server.records])
    metrics |= {f"num_clients/{status}": float(count[status]) for status in MISSING if count[status]}
    for name in ("bytes_up", "bytes_down"):
        metrics[f"comm/{name}"] = float(sum([record[name] for record in server.records]))
    return metrics | server.metrics
