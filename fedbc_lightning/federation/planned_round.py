"""What a round will do, known before it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fedbc_lightning.data.datamodule import POOLED
from fedbc_lightning.federation.round_rows import bytes_of_client
from fedbc_lightning.federation.user_methods import checked_count

if TYPE_CHECKING:
    from fedbc_lightning.federation.federation import Federation


class PlannedRound(NamedTuple):
    """What a round does if every loss is finite.

    Attributes:
        sampled: Indices of the clients that receive z.
        ids: Indices of the clients that train.
        steps: Number of local steps of each client in ``ids``.
        bytes_down: Bytes that all sampled clients together receive.
        bytes_up: Bytes that all clients in ``ids`` together send.
        ended: Simulated seconds from the start of the run to the end of the round; None without a simulated clock.
    """

    sampled: list[int]
    ids: list[int]
    steps: list[int]
    bytes_down: int
    bytes_up: int
    ended: float | None


def plan_round(federation: Federation, round: int) -> PlannedRound:
    """Tell what a round will do; all of it is a function of (seed, round). The server is in that round afterwards."""
    server, algorithm, participation = federation.server, federation.algorithm, federation.participation
    server.round = round
    participants = federation.simulation.draw(round)
    sampled, ids = participants.sampled, participants.ids
    steps = [participation.asked(client, participants.late) for client in ids]
    if algorithm.trains_pooled:
        loader = federation.datamodule.client_train_dataloader(POOLED, seed=server.seed)
        steps = [federation.local.num_steps(len(loader))]
    steps = [checked_count(algorithm, "num_steps", algorithm.num_steps(server, asked)) for asked in steps]
    down, up = bytes_of_client(algorithm, federation.server_parts, federation.layout, server, federation.channel)
    num_sent = len(ids) if participants.arrivals is None else len(participants.arrivals)
    return PlannedRound(sampled, ids, steps, down * len(sampled), up * num_sent, participants.ended)
