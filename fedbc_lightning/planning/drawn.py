"""What the rounds of a run do, without doing it: who takes part, in how many steps, and what is sent."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from fedbc_lightning.federation.federation import NUM_ROUNDS_LOOKED_AT, PlannedRound
from fedbc_lightning.state.row_file import NUM_SLOTS

if TYPE_CHECKING:
    from fedbc_lightning.trainer.trainer import FederatedTrainer

MAX_DRAW_SECONDS = 2.0
"""So long the rounds are drawn that the run will have; those that remain count like the mean of these."""


class Drawn(NamedTuple):
    """What the rounds of a run do; ``share`` of them was drawn, the numbers are of all.

    Attributes:
        first: The first rounds.
        num_steps: Of all clients and rounds.
        bytes_up: See :class:`~fedbc_lightning.planning.plan.Plan`; likewise ``bytes_down``.
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


def draw_rounds(trainer: FederatedTrainer) -> Drawn:
    """Draw the rounds of a trainer that is set up, all of them if there is time for it."""
    num_rounds, until = trainer.max_rounds, time.perf_counter() + MAX_DRAW_SECONDS
    first: list[PlannedRound] = []
    times = Counter[int]()
    steps = up = down = sampled = count = 0
    while count < num_rounds and (count < NUM_ROUNDS_LOOKED_AT or time.perf_counter() < until):
        count += 1
        round = trainer.federation.plan_round(count)
        if count <= NUM_ROUNDS_LOOKED_AT:
            first.append(round)
        times.update(round.ids)
        steps, sampled = steps + sum(round.steps), sampled + len(round.sampled)
        up, down = up + round.bytes_up, down + round.bytes_down
    touched, slots = len(times), sum(min(number, NUM_SLOTS) for number in times.values())
    more = num_rounds / count
    if count < num_rounds:
        num_clients = trainer.datamodule.num_clients
        touched = round_up(num_clients * (1 - (1 - times.total() / count / num_clients) ** num_rounds))
        slots = min(NUM_SLOTS * touched, round_up(times.total() * more))
    steps, up, down, sampled = (round_up(total * more) for total in (steps, up, down, sampled))
    return Drawn(first, steps, up, down, sampled, touched, slots, count == num_rounds)


def round_up(value: float) -> int:
    """The next whole number, forgiving what floating point adds.

    Example:
        >>> round_up(3.0000000001), round_up(3.2)
        (3, 4)
    """
    return -int(-(value - 1e-6) // 1)
