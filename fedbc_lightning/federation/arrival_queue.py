"""The event queue of clients that train asynchronously: who starts and whose update arrives in each round."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.federation.clock import Clock
from fedbc_lightning.federation.participants import CostsOfRound, Participants
from fedbc_lightning.federation.participation import Participation
from fedbc_lightning.federation.time_line import TimeLine
from fedbc_lightning.state.declaration import Arrival


class ArrivalQueue(TimeLine):
    """Keeps S clients in training; a round ends when K updates have arrived, and makes a new version of z.

    Whenever fewer than S clients are in flight, others start, sampled among those who are there, are not in flight, and
    have not started in this round; they receive the present version of z. Updates that arrive at one time are taken
    before anybody starts at that time, in the order in which they started.

    Args:
        participation: Tells how clients are sampled, and what they are asked.
        clock: Tells how long they take.
        costs: Tells the steps and bytes of the clients in a round.
        buffer_size: Number of updates K that end a round.

    Raises:
        ConfigurationError: There are fewer than K clients.
    """

    def __init__(self, participation: Participation, clock: Clock, costs: CostsOfRound, buffer_size: int) -> None:
        num_clients = len(participation.clients)
        if buffer_size > num_clients:
            raise ConfigurationError(
                f"algorithm.buffer_size: got {buffer_size}, but only {num_clients} clients train, and each starts at "
                f"most once in a round; give at most {num_clients}."
            )
        self._buffer_size = buffer_size
        super().__init__(participation, clock, costs)

    def _begin(self) -> None:
        super()._begin()
        self._flying: list[tuple[float, int, Arrival]] = []
        self._num_started = 0
        self._is_idle = np.zeros(int(self._participation.clients.max()) + 1, dtype=bool)
        self._is_idle[self._participation.clients] = True

    def _advance(self, round: int) -> Participants:
        """Move the time to the K-th arrival of a round."""
        arrivals, seconds, resting, num_draws = list[Arrival](), dict[int, float](), list[int](), 0
        while True:
            while self._flying and self._flying[0][0] <= self.now and len(arrivals) < self._buffer_size:
                arrival = heappop(self._flying)[2]
                arrivals.append(arrival)
                if arrival.version == round - 1:
                    resting.append(arrival.client)
                else:
                    self._is_idle[arrival.client] = True
            if len(arrivals) == self._buffer_size:
                break
            here = self._clock.here(self.now, self._idle)
            free = self._participation.num_sampled - len(self._flying)
            if free and len(here):
                starting = self._participation.sample(round, here, free, num_draws)
                num_draws += 1
                seconds |= self._start(round, starting)
            self.now = self._next_event(round)
        self._is_idle[resting] = True
        return Participants(list(seconds), {}, {}, seconds, self.now, arrivals)

    @property
    def _idle(self) -> np.ndarray:
        """The clients that may start, if they are there."""
        clients = self._participation.clients
        return clients[self._is_idle[clients]]

    def _start(self, round: int, clients: list[int]) -> dict[int, float]:
        """Let clients start now, and return how long each of them takes."""
        steps, down, up = self._costs(round, self._participation.num_steps(clients))
        seconds: dict[int, float] = {}
        for client, taken in zip(clients, steps, strict=True):
            seconds[client] = self._clock.seconds(client, taken, down, up)
            heappush(self._flying, (self.now + seconds[client], self._num_started, Arrival(client, round - 1)))
            self._num_started += 1
            self._is_idle[client] = False
        return seconds

    def _next_event(self, round: int) -> float:
        """Return when the next update arrives, or the next client comes that has a place to start.

        Raises:
            ConfigurationError: Neither ever happens.
        """
        arrives = self._flying[0][0] if self._flying else np.inf
        has_place = len(self._flying) < self._participation.num_sampled
        time = min(arrives, self._clock.next_start(self.now, self._idle)) if has_place else arrives
        if not np.isfinite(time):
            raise ConfigurationError(
                f"algorithm.buffer_size: round {round} waits for {self._buffer_size} updates, but too few clients are "
                "ever there by trainer.system.availability; give a smaller one."
            )
        return time
