"""Who takes part in a round, and how long each of them takes where the run has a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.state.declaration import Arrival


class Participants(NamedTuple):
    """The clients sampled in a round, and those of them that report late or not at all.

    Attributes:
        sampled: The clients that receive z, in the order of sampling.
        late: The sampled clients that train for less than they were asked to -> their local training.
        missing: The sampled clients that send nothing -> ``absent``, or ``straggler`` if their work is dropped.
        seconds: Simulated seconds in which each client receives, trains and sends; empty without a clock.
        ended: Simulated seconds from the start of the run to the end of the round; None without a clock.
        arrivals: The updates that arrive in the round, in their order; None where a round waits for its own clients.
        before: Hash of the participants of all rounds before; 0 without a clock.
        after: The same with this round.
    """

    sampled: list[int]
    late: dict[int, LocalTraining]
    missing: dict[int, str]
    seconds: dict[int, float]
    ended: float | None
    arrivals: list[Arrival] | None = None
    before: int = 0
    after: int = 0

    @property
    def ids(self) -> list[int]:
        """The sampled clients whose work the server uses, in the order of sampling."""
        return [client for client in self.sampled if client not in self.missing]


class Costs(NamedTuple):
    """What a round costs a client.

    Attributes:
        steps: Number of local steps of each client for which that was asked.
        down: Bytes that a client receives.
        up: Bytes that a client sends.
    """

    steps: list[int]
    down: int
    up: int


CostsOfRound = Callable[[int, list[int]], Costs]
"""Tells from a round, and the numbers of steps that the trainer asks for, what the method makes of them."""
