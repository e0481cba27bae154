"""Connections between the processes of a run: when one process dies, the others learn it at once."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.distributed import greeting, meeting
from fedbc_lightning.distributed.fabric import WatchingLauncher, gather_objects, leave_process_group, runs_elsewhere
from fedbc_lightning.distributed.interrupts import Interrupts

if TYPE_CHECKING:
    from lightning.fabric import Fabric

SECONDS_FOR_ALIKE = 0.5
"""Seconds that rank 0 waits for the same error of its own before it names another rank's.

Most mistakes raise the same error on all ranks.
"""

SECONDS_TO_NOTICE = 3.0
"""Seconds that a running step may go on after another process was lost, before it is broken off."""

SECONDS_TO_END = 20.0
"""Seconds after which a process that does not notice the loss of another, e.g. inside NCCL, is ended."""

SECONDS_FOR_PARENT = 3.0
"""Seconds that a forked or spawned process lets the failed one end first, which is the one its parent reports."""

WAS_KILLED = "was killed: from outside, or by the system because memory ran out. All others were stopped."
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
"""Socket options that detect after 45 seconds a machine that vanished without closing its connections."""


class LostProcessError(RuntimeError):
    """Another process of the run ended, so that this one cannot go on; the message says which, and how to resume."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a process, which ended the run.

    Attributes:
        rank: Rank of the process that failed.
        error: Class and message of its exception; None if the process died without one.
        is_silent: Whether the process still exists but does not answer.
    """

    rank: int
    error: str | None
    is_silent: bool = False


class Lifeline:
    """Connects every process to rank 0, which tells all others which process failed first.

    The operating system closes the connection of a dead process, so a ``kill -9`` is seen within milliseconds on every
    backend. Without the lifeline, gloo's errors name no process, and NCCL waits until its timeout.

    Args:
        fabric: Fabric that has been launched; all ranks create their lifeline at the same time.
        current_round: Function that returns the current round, for messages.
    """

    def __init__(self, fabric: Fabric, current_round: Callable[[], int]) -> None:
        self._rank, self._world_size = fabric.global_rank, fabric.world_size
        self._has_parent = runs_elsewhere(fabric)
        self._launcher = fabric.strategy.launcher
        self._peers: dict[int, socket.socket] = {}
        self._failure: Failure | None = None
        self._own_error: str | None = None
        self._is_closed = False
        self._current_round = current_round
        self._lock = threading.Lock()
        self._is_ending, self._is_known = threading.Event(), threading.Event()
        if self._world_size > 1:
            self._connect(fabric)
            meeting.RollCall.current = self._roll

    def _connect(self, fabric: Fabric) -> None:
        strategy: Any = fabric.strategy
        host, address = strategy.cluster_environment.main_address, (0, "")
        if self._rank == 0:
            server = greeting.serve(host, strategy.num_nodes)
            address = (server.getsockname()[1], secrets.token_hex(16))
        port, token = fabric.broadcast(address)
        if self._rank:
            self._peers[0] = socket.create_connection((host, port), timeout=greeting.SECONDS_TO_CONNECT)
            self._peers[0].settimeout(None)
            greeting.greet(self._peers[0], token, self._rank)
        else:
            with server:
                self._peers = greeting.take(server, token, range(1, self._world_size))
        gather_objects(fabric, None)
        self._roll = meeting.RollCall(self._rank, sorted(self._peers), self._send, self._give_up, self._current_round)
        for rank, peer in self._peers.items():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            threading.Thread(target=self._listen, args=(rank, peer), daemon=True).start()

    def _send(self, rank: int, message: Any) -> None:
        with suppress(OSError):  # the process died, which the thread that listens to it will report
            self._peers[rank].sendall(json.dumps(message).encode() + b"\n")

    def _listen(self, rank: int, peer: socket.socket) -> None:
        """Handle the messages of one process, until it reports that it is done or its connection breaks."""
        with suppress(OSError), peer.makefile() as lines:
            for line in lines:
                said = json.loads(line)
                if said == "done":
                    return
                if "rank" in said:
                    self._learn(Failure(**said))
                else:
                    self._roll.hear(rank, said)
        self._learn(Failure(rank, None))

    def _give_up(self, rank: int) -> None:
        """End the run because a process has stopped answering."""
        threading.Thread(target=self._learn, args=(Failure(rank, None, is_silent=True),), daemon=True).start()

    def _learn(self, failure: Failure) -> None:
        """Keep the first failure as the reason for the end of the run, and stop the main thread.

        Rank 0 passes the failure on to all others.
        """
        if self._rank == 0 and failure.rank and failure.error and self._is_ending.wait(SECONDS_FOR_ALIKE):
            failure = Failure(0, failure.error) if failure.error == self._own_error else failure
        with self._lock:
            if self._failure is not None or self._is_closed:
                return
            self._failure = failure
            if self._rank == 0:
                for rank in self._peers:
                    self._send(rank, asdict(failure))
        self._is_known.set()
        if failure.rank == self._rank:
            return
        Interrupts.lose(LostProcessError(self._describe(failure)))
        if self._is_ending.wait(SECONDS_TO_NOTICE):
            return
        Interrupts.insist()
        if not self._is_ending.wait(SECONDS_TO_END):
            if self._is_spokesman(failure):
                print(f"error: {self._describe(failure)}", file=sys.stderr, flush=True)
            os._exit(1)

    def _describe(self, failure: Failure) -> str:
        who = f"process {failure.rank} of {self._world_size} (counted from 0)"
        if failure.is_silent:
            return (
                f"{who} has not answered for {meeting.MOST_SECONDS_WITHOUT_ANSWER} s: it is stopped, or its machine "
                "hangs. All others were stopped."
            )
        if failure.error is None:
            return f"{who} {WAS_KILLED}"
        return f"{who} failed, see its own message. All others were stopped."

    def _is_spokesman(self, failure: Failure) -> bool:
        """Return whether this process reports the failure to the user: rank 0, or rank 1 if rank 0 was lost."""
        return self._rank == (1 if failure.rank == 0 and failure.error is None else 0)

    @contextmanager
    def held(self, resume: Any) -> Iterator[None]:
        """Keep the processes together during the run: an exception inside the context, on any rank, ends all of them.

        Args:
            resume: Function that returns a sentence on how to resume.

        Raises:
            LostProcessError: Another process failed, and this one reports it to the user.
            SystemExit: Another process failed, and yet another one reports it.
        """
        try:
            yield
        except BaseException as error:
            if self._world_size == 1:
                raise
            failure = self._report(error)
            if isinstance(self._launcher, WatchingLauncher):
                self._launcher.wake()
            atexit.unregister(leave_process_group)
            atexit.register(leave_process_group, int(SECONDS_TO_END))
            if failure.rank == self._rank:
                raise
            if self._own_error == failure.error and isinstance(error, ConfigurationError):
                error.is_said_elsewhere = True
                raise
            if self._has_parent:  # the parent reports the process that ends first
                time.sleep(0.0 if failure.error is None else SECONDS_FOR_PARENT)
            elif self._is_spokesman(failure):
                raise LostProcessError(f"{self._describe(failure)} {resume()}") from None
            raise SystemExit(1) from None
        finally:
            self._close()

    def _report(self, error: BaseException) -> Failure:
        """Report this process's error to the others, unless it only follows from theirs; return what ended the run."""
        is_echo = isinstance(error, (LostProcessError, torch.distributed.DistError)) or "gloo" in str(error)
        if is_echo:
            self._is_known.wait(SECONDS_TO_END)
        else:
            self._own_error = f"{type(error).__name__}: {error}"
        own = Failure(self._rank, f"{type(error).__name__}: {error}")
        self._is_ending.set()
        if self._rank == 0:
            self._learn(own)
        elif not self._is_known.is_set():
            self._send(0, asdict(own))
            self._is_known.wait(SECONDS_TO_END)
        return self._failure or own

    def _close(self) -> None:
        meeting.RollCall.current = None
        with self._lock:
            self._is_closed = True
        for rank, peer in self._peers.items():
            if self._failure is None:
                self._send(rank, "done")
            with suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
