"""The rounds of a run on its simulated clock, each of which begins when the one before it has ended."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from hashlib import sha256

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.federation.clock import Clock
from fedbc_lightning.federation.participants import CostsOfRound, Participants
from fedbc_lightning.federation.participation import Participation
from fedbc_lightning.state.declaration import ServerState

HASH = "time_line"
"""Name of the server's number that holds the hash of the rounds so far; 48 bits, which a float64 holds exactly."""
SHORTEST_PERIOD = 1e-6
"""Least period of availability, in rounds: after a million rounds floats still tell the 4,000th part of a period."""


def go_on(server: ServerState, participants: Participants) -> None:
    """Stage the hash of the rounds up to this one.

    Raises:
        ConfigurationError: Those before were others than in the run that is resumed, whose updates may be on their way.
    """
    if participants.ended is None:
        return
    if server.round > 1 and int(server[HASH]) != participants.before:
        raise ConfigurationError(
            f"trainer.system: before round {server.round}, other clients took part, or took other times, than in the "
            "run that is resumed; give sampler, algorithm and trainer the settings that they had."
        )
    server.stage(HASH, torch.tensor(participants.after, dtype=torch.float64))


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
            self._hash = int.from_bytes(sha256(repr((before, drawn)).encode()).digest()[:6], "big")
            self._latest = drawn._replace(before=before, after=self._hash)
        return self._latest

    def _advance(self, round: int) -> Participants:
        """Return who takes part in the round after the latest one, and move the time to its end."""
        participation, clock = self._participation, self._clock
        drawn = participation.drawn(round, self._somebody(participation.clients))
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

        return bisect_right(range(1, asked + 1), self._clock.latest, key=seconds)


def check_first_round(participation: Participation, clock: Clock, costs: CostsOfRound) -> None:
    """Refuse a deadline that no client can keep in the first round, and what is too long for the clock.

    Raises:
        ConfigurationError: The fastest client is late, or the slowest one takes so long that no number can tell it, or
            none can tell when availability begins and ends after many rounds.
    """
    deadline, clients = clock.system.deadline, participation.clients.tolist()
    steps, down, up = costs(1, participation.num_steps(clients))
    with np.errstate(over="ignore"):
        slowest = max(clock.seconds(*each, down, up) for each in zip(clients, steps, strict=True))
    if not math.isfinite(slowest):
        raise ConfigurationError("trainer.system: a client needs infinitely many seconds; give smaller numbers.")
    longest = min(slowest, clock.latest)
    if clock.period < SHORTEST_PERIOD * longest:
        raise ConfigurationError(
            f"trainer.system.availability: it repeats after {clock.period:.10g} seconds, less than a millionth of the "
            f"{longest:.4g} seconds that a round takes; give a longer period."
        )
    if deadline is None:
        return
    is_shortened = clock.system.late == "partial" or participation.has_stragglers
    if is_shortened:
        steps, down, up = costs(1, [1] * len(clients))
    needed = min(clock.seconds(*each, down, up) for each in zip(clients, steps, strict=True))
    if needed > clock.latest:
        what = "one step" if is_shortened else "its work"
        raise ConfigurationError(
            f"trainer.system.deadline: got {deadline:.10g}, but the fastest client needs {needed:.10g} seconds for "
            f"{what}, so every round would be empty; give more seconds, or ask for fewer local steps."
        )
