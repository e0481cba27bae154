"""Waiting of processes for each other: signals are handled during the wait, and messages say who is missing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from fedbc_lightning.distributed.interrupts import check

SECOND = timedelta(seconds=1)
SECONDS_OF_SILENCE = 60
"""Seconds after which a waiting process prints who is missing; it prints again each time its wait has doubled."""

SECONDS_TO_ANSWER = 10
"""Seconds without an answer after which that message says that a process does not answer."""

MOST_SECONDS_WITHOUT_ANSWER = 600
"""Seconds without an answer after which the run ends; a process is silent if it was stopped or its machine hangs."""


class RollCall:
    """Knows which processes have reached the collective that this process waits in, and which still answer.

    Such a collective is called a meeting; meetings are numbered alike on all ranks. While a process waits, it sends its
    meeting's number every second to the processes that it is connected to. Their lifelines answer from a thread of
    their own, even during a long step, but not if the process is stopped. Time is measured by counting these messages,
    so that none passes while this process itself is stopped.

    Args:
        rank: Rank of this process.
        peers: Ranks of the processes that this one is connected to: all others on rank 0, rank 0 on the others.
        send: Function that sends a message to one of the peers.
        give_up: Function that is called with the rank of a peer that has been silent for too long.
        current_round: Function that returns the current round, for messages.
    """

    current: RollCall | None = None
    """The roll call of this process; None outside a run."""

    def __init__(
        self, rank: int, peers: Sequence[int], send: Callable[[int, Any], None], give_up: Callable[[int], None],
        current_round: Callable[[], int],
    ) -> None:  # fmt: skip
        self._peers, self._send, self._give_up, self._current_round = peers, send, give_up, current_round
        self._speaks = rank <= 1  # rank 0 prints who is missing; if rank 0 itself is missing, rank 1 does
        self._meeting = self._seconds = 0
        self._meeting_of: dict[int, int] = {}
        self._silent: Counter[int] = Counter()

    def hear(self, rank: int, said: dict[str, int]) -> None:
        """Handle a message of the process ``rank``; called by the thread that listens to it."""
        self._silent[rank] = 0
        if "here" in said:
            self._meeting_of[rank] = said["here"]
            self._send(rank, {"alive": 1})

    def begin(self) -> None:
        """Begin the next meeting; all processes count their meetings alike."""
        self._meeting += 1
        self._seconds = 0

    def look(self) -> None:
        """Account for another second of waiting: ask the peers, and report those that are missing or silent."""
        if self._seconds == 0:
            self._silent.clear()
        self._seconds += 1
        missing = []
        for rank in self._peers:
            self._send(rank, {"here": self._meeting})
            self._silent[rank] += 1
            if self._meeting_of.get(rank, 0) < self._meeting:
                missing.append(rank)
                if self._silent[rank] == MOST_SECONDS_WITHOUT_ANSWER:
                    self._give_up(rank)
        times, rest = divmod(self._seconds, SECONDS_OF_SILENCE)
        if missing and self._speaks and rest == 0 and times & (times - 1) == 0:
            self._say(missing)

    def _say(self, missing: Sequence[int]) -> None:
        silent = [rank for rank in missing if self._silent[rank] >= SECONDS_TO_ANSWER]
        said = f"Waiting for {_named(missing)} since {self._seconds} s (round {self._current_round()})"
        if silent:
            said += (
                f"; no answer from {_named(silent)}: stopped, or the machine hangs. After "
                f"{MOST_SECONDS_WITHOUT_ANSWER} s without one the run ends, Ctrl-C or SIGTERM end it now"
            )
        print(f"{said}.", file=sys.stderr, flush=True)


def meet(collective: Callable[..., Any], *arguments: Any) -> None:
    """Call a collective of ``torch.distributed``; a signal ends the wait for the other processes within a second.

    With NCCL this function does not wait: the collective stands in the device's queue, and a wait with a time limit
    would break it off.
    """
    if torch.distributed.get_backend() == "nccl":
        collective(*arguments)
        return
    work = collective(*arguments, async_op=True)
    roll = RollCall.current
    if roll is not None:
        roll.begin()
    while True:
        try:
            work.wait(SECOND)
            return
        except RuntimeError as error:
            if "Operation timed out" not in str(error):  # a real error of gloo, not the end of one second of waiting
                raise
        check()
        if roll is not None:
            roll.look()


def _named(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
