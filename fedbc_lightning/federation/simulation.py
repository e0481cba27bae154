"""The simulation of a federation's clients: who takes part in each round, and when it ends on the simulated clock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from heapq import heappop, heappush

import numpy as np
import torch

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.federation.participation import ClientSampler, Participants, Participation
from fedbc_lightning.federation.system import Clock, System
from fedbc_lightning.state import Arrival, ServerState, StateDeclaration

# Name of the server's number that holds the hash of the rounds so far; 48 bits, which a float64 holds exactly
HASH = "time_line"

# Tells from a round, and the numbers of steps that the trainer asks for, what the method makes of them: the numbers of
# steps, the bytes that a client receives, and those that it sends
CostsOfRound = Callable[[int, list[int]], tuple[list[int], int, int]]


class Simulation:
    """Draws the participants of rounds; on a simulated clock it also says how long each takes, and when a round ends.

    All of it is a function of the settings and the seed, so that every process knows every round in advance. No
    duration depends on weights: the rounds of a resumed run are worked out again, and a checkpoint holds a hash of them
    alone.

    A round ends when its clients are done, or at the deadline. Where clients train asynchronously, S of them are kept
    in training, and a round ends when K updates have arrived, which make a new version of z.

    Args:
        participation: Tells how clients are sampled, and what they are asked.
        datamodule: The data module, after its set-up.
        algorithm: The method, whose clients may train asynchronously.
        system: Settings of the simulated clock; None if there is none. Methods whose clients train asynchronously
            always have one.

    Attributes:
        participation: Tells how clients are sampled, and what they are asked.
        num_asked: Number of clients whose work a round asks for: S, or the K of asynchronous methods.

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
        self.num_asked = 1 if algorithm.trains_pooled else self._buffer_size or participation.num_sampled
        self._clock: Clock | None = None
        if system is not None or self._buffer_size is not None:
            system = system or System()
            _check(system, algorithm, participation.sampler)
            self._clock = Clock(system, datamodule, participation.local.accumulate_grad_batches, participation.seed)

    def declare(self, state: StateDeclaration) -> None:
        """Declare the hash of the rounds so far, if there is a clock."""
        if self._clock is not None:
            state.server_scalar(HASH)

    def start(self, costs: CostsOfRound) -> None:
        """Begin before the first round.

        Args:
            costs: Tells the steps and bytes of the clients in a round.
        """
        self._costs = costs
        self._begin()

    def _begin(self) -> None:
        self._now, self._round, self._hash = 0.0, 0, 0
        # Updates on their way, by time of arrival: those of asynchronous methods alone.
        self._flying: list[tuple[float, int, Arrival]] = []
        self._num_started = 0
        clients = self.participation.clients
        self._is_idle = np.zeros(int(clients.max()) + 1, dtype=bool)
        self._is_idle[clients] = True

    def draw(self, round: int) -> Participants:
        """Return who takes part in a round; on a simulated clock also how long each client takes.

        On a clock the rounds are asked for in turn; for an earlier one the time begins anew.
        """
        if self._clock is None:
            self._latest = self.participation.draw(round)
        elif round < self._round:
            self._begin()
        while self._clock is not None and self._round < round:
            self._round += 1
            wait = self._wait_for_clients if self._buffer_size is None else self._wait_for_updates
            drawn, before = wait(self._round, self._clock), self._hash
            # The hash of the rounds so far stands for them in a checkpoint: a changed sampler or method is found out
            # on resume by another hash.
            self._hash = int.from_bytes(sha256(repr((before, drawn)).encode()).digest()[:6], "big")
            self._latest = drawn._replace(before=before, after=self._hash)
        # A client that is lost elsewhere is noted there, and may be asked again if the round begins again.
        return self._latest._replace(missing={**self._latest.missing}, seconds={**self._latest.seconds})

    def stage(self, server: ServerState, participants: Participants) -> None:
        """Give the server the participants of its round, and stage the hash of the rounds up to this one.

        Raises:
            ConfigurationError: The rounds before were others than in the run that is resumed, whose updates may be on
                their way.
        """
        server.sampled, server.ids = participants.sampled, participants.ids
        server.arrivals = participants.arrivals or []
        if participants.arrivals is None:
            self._say_who_is_missing(server, participants)
        if self._clock is None:
            return
        if server.round > 1 and int(server[HASH]) != participants.before:
            raise ConfigurationError(
                f"trainer.system: before round {server.round}, other clients took part, or took other times, than in "
                "the run that is resumed; give sampler, algorithm and trainer the settings that they had."
            )
        server.stage(HASH, torch.tensor(participants.after, dtype=torch.float64))

    def _say_who_is_missing(self, server: ServerState, participants: Participants) -> None:
        """Count the clients that could not be sampled, and say once that a round has fewer than were asked for."""
        sampled, num_used = len(participants.sampled), len(participants.ids)
        asked = sampled if self.participation.sampler.may_be_empty else self.num_asked
        if sampled < asked:
            server.log("num_clients/unavailable", asked - sampled)
        # Stragglers and dropouts that somebody asked for are no news, unless nobody is left.
        if num_used < asked and (sampled < asked or not num_used or self.participation.stragglers is None):
            server.warn_once(
                "fewer" if num_used else "nobody",
                f"round {server.round}: {num_used or 'none'} of the {asked} clients that it asks for have a part in it"
                f"{'' if num_used else ', so z stays as it is'} (said once; num_clients/ in metrics.csv counts the "
                "others). More are there with a larger share or a shorter period of trainer.system.availability; "
                "trainer.stragglers.partial_work: used keeps what stragglers did, and trainer.system.late: partial "
                "what is done by the deadline.",
            )

    def _wait_for_clients(self, round: int, clock: Clock) -> Participants:
        """Return who takes part in the round after the latest one, and move the time to its end."""
        participation, deadline = self.participation, clock.system.deadline
        # Sampling is among those who are there at the start; who leaves during a round is not simulated.
        drawn = participation.draw(round, self._somebody(clock))
        missing, late = dict(drawn.missing), dict(drawn.late)
        asked = participation.num_steps(drawn.sampled, late)
        steps, down, up = self._costs(round, asked)
        seconds = {}
        for client, wanted, taken in zip(drawn.sampled, asked, steps, strict=True):
            if missing.get(client) == "absent":
                continue
            seconds[client] = clock.seconds(client, taken, down, up)
            if seconds[client] <= clock.latest or client in missing:
                continue
            fitting = self._fitting_steps(client, round, wanted, clock) if clock.system.late == "partial" else 0
            if fitting:
                late[client] = replace(participation.local, epochs=None, steps=fitting)
                seconds[client] = self._seconds(client, round, fitting, clock)
            else:
                missing[client] = "straggler"
        # With a deadline the server cannot know before that who does not report; without one it waits for the others.
        waited = [needed for client, needed in seconds.items() if client not in missing]
        self._now += deadline if deadline is not None and missing else max(waited, default=0.0)
        return Participants(drawn.sampled, late, missing, seconds, self._now)

    def _somebody(self, clock: Clock) -> np.ndarray:
        """Return the clients who are there; if nobody is, the time moves on until somebody comes."""
        clients = self.participation.clients
        here = clock.here(self._now, clients)
        if len(here):
            return here
        self._now = clock.next_start(self._now, clients)
        return clock.here(self._now, clients)

    def _seconds(self, client: int, round: int, asked: int, clock: Clock) -> float:
        (taken,), down, up = self._costs(round, [asked])
        return clock.seconds(client, taken, down, up)

    def _fitting_steps(self, client: int, round: int, asked: int, clock: Clock) -> int:
        """Return the largest number of steps, at most `asked`, with which a client is in time; 0 if there is none."""
        # Seconds grow with the steps, so the largest number that fits is found by bisection: a method may change the
        # number that is asked for, and no formula inverts that.
        return bisect_right(range(1, asked + 1), clock.latest, key=lambda n: self._seconds(client, round, n, clock))

    def _wait_for_updates(self, round: int, clock: Clock) -> Participants:
        """Move the time to the K-th arrival of a round.

        Whenever fewer than S clients are in training, others start, sampled among those who are there, are not in
        training, and have not started in this round; they receive the present version of z. Updates that arrive at one
        time are taken before anybody starts at that time, in the order in which they started.

        Raises:
            ConfigurationError: Too few clients ever come.
        """
        participation, size = self.participation, self._buffer_size
        arrivals, seconds, resting, num_draws = list[Arrival](), dict[int, float](), list[int](), 0
        while True:
            while self._flying and self._flying[0][0] <= self._now and len(arrivals) != size:
                arrival = heappop(self._flying)[2]
                arrivals.append(arrival)
                # A client starts at most once in a round: another start from the same z would repeat the same draws.
                if arrival.version == round - 1:
                    resting.append(arrival.client)
                else:
                    self._is_idle[arrival.client] = True
            if len(arrivals) == size:
                break
            idle = participation.clients[self._is_idle[participation.clients]]
            here, free = clock.here(self._now, idle), participation.num_sampled - len(self._flying)
            if free and len(here):
                starting = participation.sample(round, here, free, num_draws)
                num_draws += 1
                seconds |= self._let_start(round, starting, clock)
                free, idle = free - len(starting), idle[self._is_idle[idle]]
            # Time moves from event to event: the next arrival, or a client that comes and has a place to start.
            arrives = self._flying[0][0] if self._flying else np.inf
            self._now = min(arrives, clock.next_start(self._now, idle)) if free else arrives
            if not np.isfinite(self._now):
                raise ConfigurationError(
                    f"algorithm.buffer_size: round {round} waits for {size} updates, but each client starts at most "
                    "once in a round, and too few ever do; give a smaller one, or another trainer.system.availability."
                )
        self._is_idle[resting] = True
        return Participants(list(seconds), {}, {}, seconds, self._now, arrivals)

    def _let_start(self, round: int, clients: list[int], clock: Clock) -> dict[int, float]:
        """Let clients start now, and return how long each of them takes."""
        steps, down, up = self._costs(round, self.participation.num_steps(clients))
        seconds = {}
        for client, taken in zip(clients, steps, strict=True):
            seconds[client] = clock.seconds(client, taken, down, up)
            # Ties are broken by the order of starting, which is the same on all machines.
            heappush(self._flying, (self._now + seconds[client], self._num_started, Arrival(client, round - 1)))
            self._num_started += 1
            self._is_idle[client] = False
        return seconds


def _check(system: System, algorithm: FederatedAlgorithm, sampler: ClientSampler) -> None:
    """Refuse a simulated clock with a method that cannot run on it.

    Raises:
        ConfigurationError: A setting has no meaning for this method.
    """
    is_asynchronous = algorithm.buffer_size is not None
    does = "keeps a number of clients in training" if is_asynchronous else "waits for all clients"
    does = "trains without clients" if algorithm.trains_pooled else does
    for name, is_wrong in (
        ("trainer.system", algorithm.trains_pooled),
        ("trainer.system.deadline", system.deadline and (is_asynchronous or algorithm.partial_work == "refused")),
        ("trainer.system.availability", system.availability and algorithm.needs_all_clients),
        ("trainer.sampler", is_asynchronous and sampler.may_be_empty),  # trainer.privacy brings one that may be
    ):
        if is_wrong:
            raise ConfigurationError(f"{name}: {algorithm} {does}; leave this setting out.")
