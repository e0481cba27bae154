"""A line between the processes of a run: when one dies, the others learn it at once, whatever they wait for."""

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
"""How long rank 0 waits for an error of its own before it names another rank's: most mistakes show on all."""

SECONDS_TO_NOTICE = 3.0
"""How long a step may last before it is broken off because another process was lost."""

SECONDS_TO_END = 20.0
"""How long a process may take to notice, e.g. inside an operation of NCCL that never ends; then it is ended."""

SECONDS_FOR_PARENT = 3.0
WAS_KILLED = "was killed: from outside, or by the system because memory ran out. All others were stopped."
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
"""For a machine that vanished without closing its connections: found out after 45 seconds."""


class LostProcessError(RuntimeError):
    """Another process of the run ended, so that this one cannot go on; says which, and how to resume."""


@dataclass(frozen=True)
class Failure:
    """What ended a run.

    Attributes:
        rank: Of the process where it began.
        error: The exception there, in words; None: the process died without one.
        is_silent: Whether the process is there but answers no more.
    """

    rank: int
    error: str | None
    is_silent: bool = False


class Lifeline:
    """One connection from every process to rank 0, which tells all which process failed first.

    The operating system closes a dead process's connection, so a ``kill -9`` is seen within milliseconds on every
    backend: gloo's own errors name no process, and NCCL waits until its timeout.

    Args:
        fabric: Launched; all ranks make their lifeline together.
        current_round: Returns the round, for messages.
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
        with suppress(OSError):  # it died: its listener will say so
            self._peers[rank].sendall(json.dumps(message).encode() + b"\n")

    def _listen(self, rank: int, peer: socket.socket) -> None:
        """The messages of one process, until it says that it is done or its connection breaks."""
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
        """End the run without a process that answers no more."""
        threading.Thread(target=self._learn, args=(Failure(rank, None, is_silent=True),), daemon=True).start()

    def _learn(self, failure: Failure) -> None:
        """Take the first failure as what ended the run; rank 0 passes it on; the main thread is told."""
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
        """Whether this process tells the user; one that failed with an error of its own tells that itself."""
        return self._rank == (1 if failure.rank == 0 and failure.error is None else 0)

    @contextmanager
    def held(self, resume: Any) -> Iterator[None]:
        """While the run goes on: an exception here ends all processes, one elsewhere this one.

        Args:
            resume: Called for a sentence on how to resume.

        Raises:
            LostProcessError: Another process failed, and this one is to tell.
            SystemExit: Another process failed, and another tells.
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
            if self._has_parent:  # which tells of the process that ends first
                time.sleep(0.0 if failure.error is None else SECONDS_FOR_PARENT)
            elif self._is_spokesman(failure):
                raise LostProcessError(f"{self._describe(failure)} {resume()}") from None
            raise SystemExit(1) from None
        finally:
            self._close()

    def _report(self, error: BaseException) -> Failure:
        """Tell the others of this process's error, unless it only follows from theirs; what ended the run."""
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
