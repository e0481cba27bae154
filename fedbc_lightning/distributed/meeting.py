"""Where processes wait for each other: signals are looked at there, and it is said for whom they wait."""

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
"""How long a process waits before it says for whom; it says so again each time that this has doubled."""

SECONDS_TO_ANSWER = 10
"""How long a process may take to answer before it is said that it does not."""

MOST_SECONDS_WITHOUT_ANSWER = 600
"""How long a process may be silent, as one is that was stopped or whose machine hangs, before the run ends."""


class RollCall:
    """Knows which processes have come to the meeting where this one waits, and which still answer.

    A process that waits says every second to those that it is connected to where it is; their lifelines answer from
    a thread of their own, also in the midst of a long step, but not where the process is stopped. Seconds are counted
    by looks, so that none pass while this process is itself stopped.

    Args:
        rank: The rank of this process.
        peers: The processes that it is connected to: all others on rank 0, rank 0 elsewhere.
        send: Sends a message to one of them.
        give_up: Called with the rank of one that has been silent for too long.
        current_round: Returns the round, for messages.
    """

    current: RollCall | None = None
    """That of this process, while the run lasts."""

    def __init__(
        self, rank: int, peers: Sequence[int], send: Callable[[int, Any], None], give_up: Callable[[int], None],
        current_round: Callable[[], int],
    ) -> None:  # fmt: skip
        self._peers, self._send, self._give_up, self._current_round = peers, send, give_up, current_round
        self._speaks = rank <= 1  # rank 0 for all others; rank 1 for the others, where rank 0 is missing
        self._meeting = self._seconds = 0
        self._meeting_of: dict[int, int] = {}
        self._silent: Counter[int] = Counter()

    def hear(self, rank: int, said: dict[str, int]) -> None:
        """Take down a message; called by the thread that listens to its process."""
        self._silent[rank] = 0
        if "here" in said:
            self._meeting_of[rank] = said["here"]
            self._send(rank, {"alive": 1})

    def begin(self) -> None:
        """Come to the next meeting, which all processes count alike."""
        self._meeting += 1
        self._seconds = 0

    def look(self) -> None:
        """Another second has passed without the others."""
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

    NCCL's are not waited for here: they stand in the device's queue, and a wait with a time limit would break them off.
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
            if "Operation timed out" not in str(error):  # gloo's own errors
                raise
        check()
        if roll is not None:
            roll.look()


def _named(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
