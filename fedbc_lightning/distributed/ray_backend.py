"""Ray: actors on this machine or in a cluster train the clients of a run."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from lightning.fabric.utilities import rank_zero_only

from fedbc_lightning.core.checks import Count, NotNegative
from fedbc_lightning.core.errors import FRAMEWORKS, ConfigurationError, add_note, in_one_line, needs, notes_of
from fedbc_lightning.core.machine import num_cores
from fedbc_lightning.core.text import shorten
from fedbc_lightning.distributed.backend import Ask, Backend, Numbered, Worker
from fedbc_lightning.distributed.heartbeat import LostProcessError
from fedbc_lightning.distributed.interrupts import check

log = logging.getLogger(__name__)

MOST_LOSSES = 3
"""Number of actors that a message, or their start, may lose before the run ends; that is no machine's fault."""
SECONDS_OF_WAIT = 0.1
"""Longest time until Ctrl-C is seen while all actors work."""


class Ray(Backend):
    """Has the clients trained and evaluated by actors of Ray, on this machine or in a cluster.

    The actor that is free gets the longest message that is left. One that is lost costs no round: its message is given
    to another one, and a new actor takes its place.

    Args:
        num_actors: Number of actors; None: one per GPU, or without GPUs one per core, and no more than there are
            clients in a round or in the first evaluation.
        gpus_per_actor: Number of GPUs of each actor, a fraction if some share one; None: all that there are are shared
            out.
        clients_per_message: Largest number of clients in a message; None: one, and with the vectorized engine an even
            share of the clients that it trains together, for each actor.
        address: Address of a running cluster, as in ``ray.init``, such as ``auto``; None: that of the environment
            variable ``RAY_ADDRESS``, or else a cluster of this machine that starts and ends with the run.
        keep_messages: Whether all messages of training are kept in the run folder, for ``fedbc-cli verify``.
    """

    def __init__(
        self,
        num_actors: Count | None = None,
        gpus_per_actor: NotNegative | None = None,
        clients_per_message: Count | None = None,
        address: str | None = None,
        keep_messages: bool = False,
    ) -> None:
        self.num_actors, self.gpus_per_actor, self.address = num_actors, gpus_per_actor, address
        self.clients_per_message, self.keep_messages = clients_per_message, keep_messages

    def open(self, make_worker: Callable[[], Worker]) -> None:
        """Prepare for a run; Ray itself starts with the first round."""
        with needs("trainer.backend: ray", "ray"):
            import ray
        self._ray: Any = ray
        with in_one_line("trainer.backend: ray: module, data and callbacks cannot be sent to the actors: "):
            self._maker: Any = ray.cloudpickle.dumps(make_worker)  # at once: the run writes to module and data
        self._is_ours, self._num_workers = False, 0
        self._actors, self._free = set[Any](), list[Any]()
        self._running = dict[Any, tuple[Any, int | None]]()  # reference of a result -> actor, number of the message
        self._losses = Counter[int | None]()

    def num_workers(self, num_clients: int) -> int:
        """Return the number of actors, which it has started, for a round of ``num_clients``."""
        if not self._num_workers:
            self._connect(num_clients)
        return self._num_workers

    def _connect(self, num_clients: int) -> None:
        """Join the cluster or start one, and start the actors."""
        ray, self._is_ours = self._ray, connect(self.address, self.num_actors, "trainer.backend")
        found = ray.cluster_resources()
        cpus, gpus = int(found.get("CPU", 1)), int(found.get("GPU", 0))
        number = self.num_actors or max(1, min(gpus or cpus, num_clients))
        share = self.gpus_per_actor
        if share is None:  # Ray's shares are parts of one GPU
            share = 0 if not gpus else gpus // number if gpus >= number else 1 / math.ceil(number / gpus)
        is_local = self._is_ours and address_of(self.address) == "local"
        if is_local and number * share > gpus:
            raise ConfigurationError(
                f"trainer.backend: {number} actors with {share:g} GPUs each, and this machine has {gpus} GPUs."
            )
        free = int(ray.available_resources().get("CPU", 0))
        if free < number and not is_local:
            log.warning(f"trainer.backend: {free} of {number} actors start now, the others when processors are free.")
        self._make = ray.remote(_Actor).options(num_cpus=1, num_gpus=share).remote
        self._maker, self._num_workers = ray.put(self._maker), number
        for _ in range(number):
            self._add()

    def _add(self) -> None:
        """Start an actor, which is free when its worker is made."""
        actor = self._make()
        self._actors.add(actor)
        self._running[actor.begin.remote([self._maker], sys.path)] = actor, None

    def work(self, start: bytes, asks: Sequence[Ask]) -> Iterator[Numbered]:
        """Have the messages answered, longest first."""
        self.num_workers(len(asks))
        # Once per round, and in a list, since Ray would read it once more for each message.
        reference = [self._ray.put(start)]
        todo = sorted(range(len(asks)), key=lambda index: asks[index].num_steps)
        self._losses.clear()
        num_left, come = len(asks), list[Numbered]()
        while num_left:
            while todo and self._free:
                actor, next_one = self._free.pop(), todo.pop()
                self._running[actor.answer.remote(reference, asks[next_one].down)] = actor, next_one
            yield from come  # now, so that no actor waits until they are read
            done, _ = self._ray.wait([*self._running], timeout=SECONDS_OF_WAIT)
            check()
            come = []
            for each in done:
                actor, index = self._running.pop(each)
                try:
                    answer = self._ray.get(each)
                except self._ray.exceptions.RayError as error:  # an actor raises nothing itself
                    self._lose(actor, index, asks, error)
                    todo += [] if index is None else [index]
                    continue
                if isinstance(answer, _Raised):
                    raise answer.error()
                self._free.append(actor)
                if index is not None:
                    num_left -= 1
                    come.append((index, answer))
        yield from come

    def _lose(self, actor: Any, index: int | None, asks: Sequence[Ask], error: Exception) -> None:
        """Put a new actor into the place of a lost one, unless too many were lost."""
        clients = "no client" if index is None else f"client {shorten(asks[index].clients)}"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (lines or [type(error).__name__])[-1].partition(". ")[0].rstrip(".")  # guesses at the causes follow
        self._actors.discard(actor)
        self._ray.kill(actor)  # it may be alive and out of reach
        self._losses[index] += 1
        if self._losses[index] >= MOST_LOSSES:
            raise LostProcessError(
                f"trainer.backend: {MOST_LOSSES} actors were lost one after another with {clients}: {reason}"
            )
        log.warning(f"An actor with {clients} was lost ({reason}); another one takes its place.")
        self._add()

    def close(self) -> None:
        """End the actors, and Ray itself if this run has started or joined it."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_ours:
            self._ray.shutdown()
        for name in [name for name in vars(self) if name.startswith("_")]:
            delattr(self, name)


def address_of(given: str | None) -> str:
    """Return the address of a cluster, ``local`` for one of this machine that ends with this process."""
    return given or os.environ.get("RAY_ADDRESS") or "local"


def connect(address: str | None, num_cpus: int | None, setting: str) -> bool:
    """Join a cluster of Ray, or start one on this machine, unless this process is in one.

    Args:
        address: Address of the cluster; None: that of the environment, or else this machine.
        num_cpus: Number of processes that compute at a time on this machine; None: one for each core.
        setting: Name of the setting that asks for it.

    Returns:
        Whether it is to be left again.

    Raises:
        ConfigurationError: It cannot be reached.
    """
    import ray

    if ray.is_initialized():
        return False
    address, cores, own = address_of(address), num_cores(), dict[str, Any]()
    # Ray sends statistics of its use to its makers unless it is told not to.
    environment = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address == "local":
        own = {"num_cpus": num_cpus or cores}
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // own["num_cpus"])))
        environment["OMP_NUM_THREADS"] = threads  # shared out as among the processes of `devices`
    handler, (host, _, port) = signal.getsignal(signal.SIGTERM), address.rpartition("/")[2].rpartition(":")
    with mock.patch.dict(os.environ, environment), in_one_line(f"{setting}: ray: address {address}: "):
        if port.isdecimal():  # for a quarter of an hour, Ray would try again where nothing answers
            socket.create_connection((host.strip("[]"), int(port)), 20).close()
        ray.init(address=address, include_dashboard=False, logging_level=logging.ERROR, **own)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)  # Ray's would end the process in the middle of a step
    return True


class _Raised:
    """An exception of a worker on its way to the run: with its notes, and the user's part of its traceback as text."""

    def __init__(self, error: BaseException, pickle: Any) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        users = [frame for frame in frames if not {*Path(frame.filename).parts} & {*FRAMEWORKS}]
        self.text, self.notes = "".join(traceback.format_list(users or frames)), notes_of(error)
        try:
            self.data = pickle.dumps(error)
            pickle.loads(self.data)
        except Exception:  # its class cannot be copied
            self.data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))

    def error(self) -> BaseException:
        """Return the exception as the worker has raised it."""
        from ray import cloudpickle

        error = cloudpickle.loads(self.data)
        for note in self.notes:
            if note not in notes_of(error):
                add_note(error, note)
        error.__cause__ = RuntimeError(f"in an actor of Ray\n{self.text}")
        return error


class _Actor:
    """Trains clients in a process of Ray's; what it raises it returns, so that all other errors are Ray's."""

    def begin(self, maker: list[Any], path: list[str]) -> _Raised | None:
        """Make the worker; its modules are searched where the run finds them, as in processes that are spawned."""
        import ray

        sys.path += [folder for folder in path if folder not in sys.path]

        self._ray, self._reference, self._start = ray, None, b""
        vars(rank_zero_only)["rank"] = 1  # the run itself says what is to be said once
        try:
            self._worker: Worker = ray.cloudpickle.loads(ray.get(maker[0]))()
        except BaseException as error:
            return _Raised(error, ray.cloudpickle)
        return None

    def answer(self, start: list[Any], down: bytes) -> bytes | _Raised:
        """Train the clients of a message."""
        if start[0] != self._reference:
            self._reference, self._start = start[0], self._ray.get(start[0])
        try:
            return self._worker.answer(self._start, down)
        except BaseException as error:
            return _Raised(error, self._ray.cloudpickle)
