"""Draws the rounds of a run without training: sampled clients, their steps, and the bytes sent."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.planned_round import PlannedRound, plan_round
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
        round = plan_round(federation, count)
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
