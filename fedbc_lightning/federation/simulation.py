"""The simulation of a federation's clients: who takes part in each round, and when it ends on the simulated clock."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.federation.clock import Clock
from fedbc_lightning.federation.participation import Participants, Participation
from fedbc_lightning.federation.sampling import ClientSampler
from fedbc_lightning.federation.system import System
from fedbc_lightning.state import Arrival, ServerState, StateDeclaration

log = logging.getLogger(__name__)

# Name of the server's number that holds the hash of the rounds so far; 48 bits, which a float64 holds exactly
HASH = "time_line"


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


# Tells from a round, and the numbers of steps that the trainer asks for, what the method makes of them
CostsOfRound = Callable[[int, list[int]], Costs]


class Simulation:
    """Draws the participants of rounds; on a simulated clock it also says how long each takes, and when a round ends.

    All of it is a function of the settings and the seed, so that every process knows every round in advance.

    Args:
        participation: Tells how clients are sampled, and what they are asked.
        datamodule: The data module, after its set-up.
        algorithm: The method, whose clients may train asynchronously.
        system: Settings of the simulated clock; None if there is none. Methods whose clients train asynchronously
            always have one.

    Attributes:
        participation: Tells how clients are sampled, and what they are asked.

    Raises:
        ConfigurationError: The settings do not fit the data or the method.
    """

    def __init__(
        self,
        participation: Participation,
        datamodule: FederatedDataModule,
        algorithm: FederatedAlgorithm,
        system: System | None = None,
    ) -> None:
        self.participation, self._buffer_size = participation, algorithm.buffer_size
        self._clock: Clock | None = None
        if system is not None or self._buffer_size is not None:
            system = system or System()
            _check(system, algorithm, participation.sampler)
            self._clock = Clock(system, datamodule, participation.local.accumulate_grad_batches, participation.seed)
        self._time_line: TimeLine | None = None
        self._has_said_nobody = False

    def declare(self, state: StateDeclaration) -> None:
        """Declare the hash of the rounds so far, if there is a clock."""
        if self._clock is not None:
            state.server_scalar(HASH)

    def start(self, costs: CostsOfRound) -> None:
        """Begin the first round; without a clock, all rounds begin and end at no time.

        Args:
            costs: Tells the steps and bytes of the clients in a round.

        """
        if self._clock is None:
            return
        self._time_line = (
            TimeLine(self.participation, self._clock, costs)
            if self._buffer_size is None
            else ArrivalQueue(self.participation, self._clock, costs, self._buffer_size)
        )

    def draw(self, round: int) -> Participants:
        """Return who takes part in a round; on a simulated clock also how long each client takes."""
        drawn = self.participation.draw(round) if self._time_line is None else self._time_line.at(round)
        if drawn.sampled and not (drawn.ids or drawn.arrivals or self._has_said_nobody):
            self._has_said_nobody = True
            rank_zero_only(log.warning)(
                f"round {round}: every sampled client vanished or was dropped as a straggler, so z stays as it is "
                "(said once; see num_clients/absent and num_clients/straggler). trainer.stragglers.partial_work: used "
                "keeps what stragglers did, and trainer.system.late: partial what is done by the deadline."
            )
        return drawn

    def stage(self, server: ServerState, participants: Participants) -> None:
        """Give the server the participants of its round, and stage the hash of the rounds up to this one.

        Raises:
            ConfigurationError: The rounds before were others than in the run that is resumed, whose updates may be on
                their way.
        """
        server.ids, server.arrivals = participants.ids, participants.arrivals or []
        if self._time_line is None:
            return
        if server.round > 1 and int(server[HASH]) != participants.before:
            raise ConfigurationError(
                f"trainer.system: before round {server.round}, other clients took part, or took other times, than in "
                "the run that is resumed; give sampler, algorithm and trainer the settings that they had."
            )
        server.stage(HASH, torch.tensor(participants.after, dtype=torch.float64))

    def describe(self) -> dict[str, str]:
        """Return what the simulated time of rounds depends on, which must stay the same in a run."""
        if self._clock is None:
            return {}
        who = self.participation
        parts = [
            self._clock.describe(who.num_steps(who.clients.tolist())),
            f"seed {who.seed}, {who.num_sampled} clients by {type(who.sampler).__name__}",
            str(who.stragglers or ""),
            f"buffer_size {self._buffer_size}" if self._buffer_size is not None else "",
        ]
        return {"trainer.system": ", ".join(filter(None, parts))}


class TimeLine:
    """Works out who takes part in a round, and when it ends, from all rounds before it.

    No duration depends on weights, so that the rounds of a resumed run are worked out again; a checkpoint holds a hash
    of them alone. The rounds are asked for in turn; for an earlier one the time line begins anew.

    Args:
        participation: Tells how clients are sampled, and what they are asked.
        clock: Tells how long they take.
        costs: Tells the steps and bytes of the clients in a round.

    Attributes:
        now: Simulated seconds from the start of the run to the end of the latest round.
    """

    def __init__(self, participation: Participation, clock: Clock, costs: CostsOfRound) -> None:
        self._participation, self._clock, self._costs = participation, clock, costs
        self._has_said_nobody = False
        self._begin()

    def _begin(self) -> None:
        self.now, self._round, self._hash = 0.0, 0, 0

    def at(self, round: int) -> Participants:
        """Return who takes part in a round."""
        if round < self._round:
            self._begin()
        while self._round < round:
            self._round += 1
            drawn, before = self._advance(self._round), self._hash
            # The hash of the rounds so far stands for them in a checkpoint: on resume the rounds are worked out again,
            # and a changed sampler or method is found out by another hash.
            self._hash = int.from_bytes(sha256(repr((before, drawn)).encode()).digest()[:6], "big")
            self._latest = drawn._replace(before=before, after=self._hash)
        return self._latest

    def _advance(self, round: int) -> Participants:
        """Return who takes part in the round after the latest one, and move the time to its end."""
        participation, clock = self._participation, self._clock
        # Sampling is among those who are there at the start; who leaves during a round is not simulated.
        drawn = participation.draw(round, self._somebody(participation.clients))
        missing, late, deadline = dict(drawn.missing), dict(drawn.late), clock.system.deadline
        asked = [participation.asked(client, late) for client in drawn.sampled]
        steps, down, up = self._costs(round, asked)
        seconds: dict[int, float] = {}
        for client, wanted, taken in zip(drawn.sampled, asked, steps, strict=True):
            if missing.get(client) == "absent":
                continue
            seconds[client] = clock.seconds(client, taken, down, up)
            if seconds[client] <= clock.latest or client in missing:
                continue
            is_partial = clock.system.late == "partial"
            fitting = self._fitting_steps(client, round, wanted) if is_partial else 0
            if fitting:
                late[client] = replace(participation.local, epochs=None, steps=fitting)
                (taken,) = self._costs(round, [fitting]).steps
                seconds[client] = clock.seconds(client, taken, down, up)
            else:
                missing[client] = "straggler"
        # With a deadline the server cannot know before that who does not report; without one it waits for the others.
        waited = [needed for client, needed in seconds.items() if client not in missing]
        self.now += deadline if deadline is not None and missing else max(waited, default=0.0)
        return Participants(drawn.sampled, late, missing, seconds, self.now)

    def _somebody(self, clients: np.ndarray) -> np.ndarray:
        """Return those of the clients who are there; if nobody is, the time moves on until somebody comes."""
        here = self._clock.here(self.now, clients)
        if len(here):
            return here
        until = self._clock.next_start(self.now, clients)
        if not self._has_said_nobody:
            self._has_said_nobody = True
            rank_zero_info(
                f"trainer.system.availability: nobody is there after {self.now:,.6g} simulated seconds; the round "
                f"begins when a client comes, at {until:,.6g} (said once)."
            )
        self.now = until
        return self._clock.here(until, clients)

    def _fitting_steps(self, client: int, round: int, asked: int) -> int:
        """Return the largest number of steps, at most `asked`, with which a client is in time; 0 if there is none."""

        def seconds(wanted: int) -> float:
            (taken,), down, up = self._costs(round, [wanted])
            return self._clock.seconds(client, taken, down, up)

        # Seconds grow with the steps, so the largest number that fits is found by bisection: a method may change the
        # number that is asked for, and no formula inverts that.
        return bisect_right(range(1, asked + 1), self._clock.latest, key=seconds)


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
    """

    def __init__(self, participation: Participation, clock: Clock, costs: CostsOfRound, buffer_size: int) -> None:
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
                # A client starts at most once in a round: another start from the same z would repeat the same draws.
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
            # Ties are broken by the order of starting, which is the same on all machines.
            heappush(self._flying, (self.now + seconds[client], self._num_started, Arrival(client, round - 1)))
            self._num_started += 1
            self._is_idle[client] = False
        return seconds

    def _next_event(self, round: int) -> float:
        """Return when the next update arrives, or the next client comes that has a place to start.

        Raises:
            ConfigurationError: Neither ever happens.
        """
        # Time moves from event to event; nothing can change between two of them.
        arrives = self._flying[0][0] if self._flying else np.inf
        has_place = len(self._flying) < self._participation.num_sampled
        time = min(arrives, self._clock.next_start(self.now, self._idle)) if has_place else arrives
        if not np.isfinite(time):
            raise ConfigurationError(
                f"algorithm.buffer_size: round {round} waits for {self._buffer_size} updates, but each client starts "
                "at most once in a round, and too few ever do; give a smaller one, or another "
                "trainer.system.availability."
            )
        return time


def _check(system: System, algorithm: FederatedAlgorithm, sampler: ClientSampler) -> None:
    """Refuse a simulated clock with a method that cannot run on it.

    Raises:
        ConfigurationError: A setting has no meaning for this method.
    """
    is_asynchronous = algorithm.buffer_size is not None
    for name, is_wrong in (
        ("trainer.system", algorithm.trains_pooled),
        ("trainer.system.deadline", system.deadline and (is_asynchronous or algorithm.partial_work == "refused")),
        ("trainer.system.availability", system.availability and algorithm.needs_all_clients),
        ("trainer.sampler", is_asynchronous and sampler.may_be_empty),  # trainer.privacy brings one that may be
    ):
        if is_wrong:
            raise ConfigurationError(f"{name}: {algorithm} {_waits(algorithm)}; leave this setting out.")


def _waits(algorithm: FederatedAlgorithm) -> str:
    if algorithm.trains_pooled:
        return "trains without clients"
    return "waits for all clients" if algorithm.buffer_size is None else "keeps a number of clients in training"
