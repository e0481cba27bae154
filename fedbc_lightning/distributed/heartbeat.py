"""Heartbeats of processes in torch's key-value store: they name a process that was lost, and limit the wait for it.

torchrun, SLURM and torch's spawned processes end a group when one of its processes dies, and gloo breaks off what the
others wait in. What is added here is the name of the process, a limit for one that hangs, and the end of processes that
wait inside NCCL.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch.distributed import PrefixStore

from fedbc_lightning.core.private_lightning import start_method
from fedbc_lightning.core.private_torch import store_of_group
from fedbc_lightning.distributed.interrupts import Interrupts, StoppedError, check

# Seconds without a heartbeat after which a broken connection is put down to a process
SECONDS_TO_NAME = 5

# Seconds without a heartbeat after which the run ends if no connection broke: the process or its machine hangs
MOST_SECONDS_WITHOUT_ANSWER = 120

# Seconds without a heartbeat after which a process that was told to end does not wait for an answer
SECONDS_TO_ANSWER = 2

# Seconds that rank 0 has to report a mistake first
SECONDS_FOR_ALIKE = 5.0

# Seconds after which a process that does not notice the loss of another, e.g. inside NCCL, is ended
SECONDS_TO_END = 20.0

# Seconds that a forked or spawned process lets the failed one end first, which is the one its parent reports
SECONDS_FOR_PARENT = 3.0

WAS_LOST = "was killed, perhaps because memory ran out, or does not answer"


class LostProcessError(RuntimeError):
    """Another process of the run ended, so that this one cannot go on; the message says which, and how to resume."""


class Failure(NamedTuple):
    """The first failure of a process, which ended the run.

    Attributes:
        rank: Rank of the process that failed.
        is_lost: Whether the process was lost without an exception of its own.
    """

    rank: int
    is_lost: bool = True


class Heartbeat:
    """Tells the other processes once a second that this one is alive, and learns which process failed first.

    Rank 0 holds the store, so it watches all others and they watch rank 0; a failure is written into the store, where
    all find it. Two threads do this: one talks to the store, and hangs while rank 0 is stopped; one counts.

    Args:
        fabric: Fabric that has launched several processes; all ranks create their heartbeat at the same time.
    """

    current: Heartbeat | None = None
    """The heartbeat of this process; None outside a run."""

    number = 0
    """Number of runs that this process has begun; each has names of its own in the store."""

    def __init__(self, fabric: Fabric) -> None:
        self._rank, self._world_size = fabric.global_rank, fabric.world_size
        strategy: Any = fabric.strategy
        self._has_parent = start_method(strategy) != "popen"
        self._children = getattr(strategy.launcher, "started", ())
        # Seconds since each one's last beat, minus infinity if it has left in good order
        self._silence = dict.fromkeys([0] if self._rank else range(1, self._world_size), 0.0)
        self._failure: Failure | None = None
        self._is_broken = self._is_closed = False
        self._patience = SECONDS_TO_NAME
        self._lock, self._wake, self._is_ending = threading.Lock(), threading.Event(), threading.Event()
        Heartbeat.number += 1
        group: Any = store_of_group()
        self._store = PrefixStore(f"heartbeat_{Heartbeat.number}", group)
        while isinstance(group, PrefixStore):
            group = group.underlying_store
        self._place = group.host, group.port
        if self._rank == 0:
            for key in ("failure", "broken", *map(str, range(self._world_size))):
                self._store.set(key, "")
        fabric.barrier()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()
        threading.Thread(target=self._watch, daemon=True).start()
        Heartbeat.current = self

    def _beat(self) -> None:
        """Exchange heartbeats and failures with the others through the store, until the run is over."""
        last: dict[int, bytes] = {}
        try:
            while True:
                is_last = self._is_closed  # read first, so that the last failure is written, too
                self._look_for_store()
                self._store.set(str(self._rank), "over" if is_last else str(time.monotonic()))
                if self._is_broken:
                    self._store.set("broken", "yes")
                if self._failure is not None:  # the first one of all processes stays
                    self._store.compare_set("failure", "", json.dumps(self._failure))
                failure, broken, *beats = self._store.multi_get(["failure", "broken", *map(str, self._silence)])
                self._is_broken |= bool(broken)
                if failure:
                    self._learn(Failure(*json.loads(failure)))
                for rank, beat in zip(self._silence, beats, strict=True):
                    if beat != last.get(rank):
                        self._silence[rank], last[rank] = (-math.inf if beat == b"over" else 0.0), beat
                # The store ends with rank 0, and others that answer and are still in the run need it.
                if is_last and (self._rank or not self._hears_others()):
                    return
                self._wake.wait(1.0)
                self._wake.clear()
        except (torch.distributed.DistError, ConnectionRefusedError):  # the store has gone, and rank 0 with it
            self._learn(Failure(0))

    def _look_for_store(self) -> None:
        """Raise ConnectionRefusedError if the store has gone, before torch finds out and prints its own stack."""
        try:
            socket.create_connection(self._place, 1.0).close()
        except ConnectionRefusedError:
            raise
        except OSError:  # the network does not answer: the others' silence will tell
            pass

    def _watch(self) -> None:
        """Count the seconds since the others' last beats, so that none passes while this process itself is stopped."""
        while self._beats.is_alive():
            time.sleep(1.0)
            for number, child in enumerate(self._children, start=1):
                if (child.poll() or 0) < 0:  # ended by a signal, so that it has written no failure
                    self._learn(Failure(self._rank + number))
            for rank in self._silence:
                self._silence[rank] += 1
                if self._silence[rank] >= (SECONDS_TO_NAME if self._is_broken else MOST_SECONDS_WITHOUT_ANSWER):
                    self._learn(Failure(rank))

    def _hears_others(self) -> bool:
        return any(0 <= seconds < self._patience for seconds in self._silence.values())

    def _learn(self, failure: Failure) -> None:
        """Keep the first failure as the reason for the end of the run, and stop the main thread."""
        with self._lock:
            if self._failure is not None or self._is_closed:
                return
            self._failure = failure
        if failure.is_lost and failure.rank in self._silence:
            self._silence[failure.rank] = math.inf  # nobody waits for it any more
        self._wake.set()
        if failure.rank != self._rank:
            Interrupts.lose(LostProcessError(self._describe(failure)))
            threading.Thread(target=self._end_if_stuck, args=(failure,), daemon=True).start()

    def _end_if_stuck(self, failure: Failure) -> None:
        """End this process if its main thread does not, because it waits inside NCCL or in a long step."""
        if not self._is_ending.wait(SECONDS_TO_END):
            if self._is_spokesman(failure):
                print(f"error: {self._describe(failure)}", file=sys.stderr, flush=True)
            os._exit(1)

    def _describe(self, failure: Failure) -> str:
        what = WAS_LOST if failure.is_lost else "failed, see its own message"
        return f"process {failure.rank} of {self._world_size} (counted from 0) {what}. All others were stopped."

    def _is_spokesman(self, failure: Failure) -> bool:
        """Return whether this process reports the failure to the user: rank 0, or rank 1 if rank 0 was lost."""
        return self._rank == (1 if failure.rank == 0 and failure.is_lost else 0)

    @contextmanager
    def held(self, resume: Callable[[], str]) -> Iterator[None]:
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
            if isinstance(error, torch.distributed.DistError):  # NCCL's
                self.explained(error)
            elif not isinstance(error, LostProcessError):  # this one only follows from the failure of another process
                if isinstance(error, (KeyboardInterrupt, StoppedError)):
                    self._patience = SECONDS_TO_ANSWER
                if self._rank:  # most mistakes raise the same error on all ranks, and rank 0 has the user's ear
                    until = time.monotonic() + SECONDS_FOR_ALIKE
                    while self._failure is None and self._hears_others() and time.monotonic() < until:
                        self._wake.set()
                        time.sleep(0.05)
                self._learn(Failure(self._rank, is_lost=False))
            self._is_ending.set()
            failure = self._failure or Failure(self._rank)
            atexit.unregister(leave_process_group)  # gloo would wait for a collective with those that do not answer
            if torch.distributed.get_backend() == "nccl":
                atexit.register(leave_process_group, int(SECONDS_TO_END))
            if failure.rank == self._rank:
                raise
            if self._has_parent and not failure.is_lost:  # the parent reports the process that ends first
                time.sleep(SECONDS_FOR_PARENT)
            elif self._has_parent or self._is_spokesman(failure):
                raise LostProcessError(f"{self._describe(failure)} {resume()}") from None
            raise SystemExit(1) from None
        finally:
            Heartbeat.current, self._is_closed = None, True
            until = time.monotonic() + SECONDS_TO_NAME
            while self._beats.is_alive() and (
                self._failure is None or (self._hears_others() and time.monotonic() < until)
            ):
                self._wake.set()
                time.sleep(0.01)
            self._wake.set()
            self._beats.join(1.0)  # a thread that is inside of torch's C++ when Python ends aborts the process
            for number, child in enumerate(self._children, start=1):
                if self._failure is not None and self._silence.get(self._rank + number, 0) >= self._patience:
                    child.kill()  # it is stopped or hangs, and would find nobody

    def explained(self, error: Exception) -> Exception:
        """Return the error to raise for a broken connection, once it is known which process was lost.

        Raises:
            SystemExit: A signal came in the meantime, such as that of torchrun, which ends the other processes, too.
        """
        self._is_broken = True
        self._wake.set()
        until = time.monotonic() + SECONDS_TO_END
        while self._failure is None and time.monotonic() < until:
            time.sleep(0.1)
            check()
        return error if self._failure is None else LostProcessError(self._describe(self._failure))


def leave_process_group(seconds: int = 0) -> None:
    """Destroy the process group before Python exits; gloo's threads would abort the process otherwise.

    Args:
        seconds: Time limit, after which SIGALRM ends the process; a collective begun with a process that is stopped or
            dead may never return. 0 sets no limit.
    """
    if torch.distributed.is_initialized():
        alarm: Any = getattr(signal, "alarm", id)  # Windows has none, and no NCCL, whose collectives wait without end
        alarm(seconds)
        torch.distributed.destroy_process_group()
        alarm(0)
