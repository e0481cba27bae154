"""Fabric for clients in parallel: each rank trains its own clients, and ranks exchange results once per round."""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn import functional

from fedbc_lightning.core import private_torch
from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.private_lightning import (
    LaunchedStrategy,
    ScriptLauncher,
    UnpatchedFabric,
    forget_exit_handler,
    start_method,
)
from fedbc_lightning.distributed.heartbeat import Heartbeat, leave_process_group
from fedbc_lightning.distributed.interrupts import check

Value = TypeVar("Value")
# Values of trainer.strategy for several processes, with the way in which each starts them
START_METHODS = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}

# Timeout of the process group: longer than any round, because heartbeats find dead processes, not a timeout
LONGEST_ROUND = timedelta(days=7)

# Seconds that a process waits for the others at the start before the run ends
SECONDS_TO_MEET = 600.0


class ClientParallelStrategy(LaunchedStrategy):
    """Strategy with DDP's launcher, process group and devices, but without its gradient synchronisation.

    DDP itself would average gradients across clients, hang when clients make different numbers of steps, and insert a
    DistributedSampler.
    """

    is_joined = False
    """Whether this process has joined the process group."""

    def script_launcher(self) -> WatchingLauncher:
        """Return a launcher that ends all processes if one ends before the run begins."""
        return WatchingLauncher(self)

    def setup_environment(self) -> None:
        """Join the process group, and leave it when Python exits; gloo's threads would abort the process otherwise."""
        if start_method(self) == "fork":
            torch.set_num_threads(1)  # OpenMP's other threads do not survive a fork: the first shared loop would hang
        self._timeout = timedelta(seconds=SECONDS_TO_MEET)
        with self._joining():
            super().setup_environment()
        self.is_joined = True
        private_torch.set_group_timeout(LONGEST_ROUND)
        forget_exit_handler()
        atexit.register(leave_process_group)

    @contextmanager
    def _joining(self) -> Iterator[None]:
        """Say that this process waits for the others, let Ctrl-C end the wait, and explain its limit.

        Raises:
            ConfigurationError: Not all processes came in time.
        """
        environment: Any = self.cluster_environment
        host, port, in_all = environment.main_address, environment.main_port, self.num_nodes * self.num_processes
        node = environment.node_rank()
        said = f"this is node {node}, waiting at {host}:{port} for the others, {in_all} processes in all"
        if self.num_nodes > 1:
            said += f". On each machine start the same command with MASTER_ADDR={host} MASTER_PORT={port} NODE_RANK=..."
        waits = threading.Timer(5 if self.num_nodes > 1 else 60, lambda: print(said, file=sys.stderr, flush=True))
        if environment.local_rank() == 0:
            waits.start()
        # While torch waits, no Python code runs, so Python's handler of Ctrl-C would not run: the system must end us.
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        is_ours &= threading.current_thread() is threading.main_thread()
        if is_ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            yield
        except (torch.distributed.DistError, TimeoutError) as error:
            raise ConfigurationError(
                f"trainer.devices: process {environment.global_rank()} of {in_all} (counted from 0) did not meet all "
                f"others at {host}:{port}: {first_line(error)}. Start all of them again."
            ) from error
        finally:
            waits.cancel()
            if is_ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait until all processes have reached this call."""
        if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "nccl":
            super().barrier(*args, **kwargs)
        else:
            meet(torch.distributed.all_reduce, torch.zeros(1))  # unlike torch's barrier, lets signals through

    def broadcast(self, obj: Value, src: int = 0) -> Value:
        """Return the object of rank ``src`` on every rank."""
        if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "nccl":
            return super().broadcast(obj, src)
        return gather_objects(self, obj if self.global_rank == src else None)[src]


class WatchingLauncher(ScriptLauncher):
    """Starts this command once more for each further process, and ends all if one ends before the run begins."""

    def __init__(self, strategy: ClientParallelStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def watch(self) -> None:
        """Watch the processes in a thread until they have joined the process group."""
        threading.Thread(target=self._watch_arrival, daemon=True).start()

    def _watch_arrival(self) -> None:
        while not self._strategy.is_joined:
            ended = next((process for process in self.started if process.poll() is not None), None)
            if ended is not None:
                who = f"process {self.started.index(ended) + 1} of {self.num_processes} (counted from 0)"
                print(f"error: {who} ended with status {ended.returncode} before the run began", file=sys.stderr)
                for process in self.started:
                    process.terminate()
                os._exit(1)
            time.sleep(0.1)


def make_fabric(accelerator: str, strategy: str | Strategy, devices: Any, num_nodes: int, precision: str) -> Fabric:
    """Return a Fabric whose strategy is a single device or :class:`ClientParallelStrategy`.

    Raises:
        ConfigurationError: The strategy shards the model (FSDP, DeepSpeed, ...), or Fabric refuses the settings.
    """
    settings: dict[str, Any] = {"devices": devices, "num_nodes": num_nodes, "precision": precision}
    make = partial(UnpatchedFabric, accelerator=accelerator, **settings)
    try:
        fabric = make(strategy=strategy)
        if isinstance(fabric.strategy, DDPStrategy) and not isinstance(fabric.strategy, ClientParallelStrategy):
            method: Any = START_METHODS.get(str(strategy), start_method(fabric.strategy))
            fabric = make(strategy=ClientParallelStrategy(start_method=method))
    except Exception as error:
        raise ConfigurationError(f"trainer.accelerator / strategy / devices / precision: {error}") from error
    if not isinstance(fabric.strategy, (SingleDeviceStrategy, ClientParallelStrategy)):
        raise ConfigurationError(
            f"trainer.strategy: {type(fabric.strategy).__name__} splits or synchronises one model over devices, but "
            f"here each device trains whole clients; use auto, {', '.join(START_METHODS)}."
        )
    return fabric


def meet(collective: Callable[..., Any], *arguments: Any) -> None:
    """Call a collective of ``torch.distributed``; a signal ends the wait for the other processes within a second.

    With NCCL this function does not wait: the collective stands in the device's queue, and a wait with a time limit
    would break it off.
    """
    if torch.distributed.get_backend() == "nccl":
        collective(*arguments)
        return
    heartbeat, work = Heartbeat.current, None
    while True:
        try:
            work = work or collective(*arguments, async_op=True)
            # While torch waits, Python handles no signal: so it waits for one second again and again.
            work.wait(timedelta(seconds=1))
            return
        except RuntimeError as error:
            if "Operation timed out" not in str(error):  # an error of gloo's, which names no process
                raise error if heartbeat is None else heartbeat.explained(error) from None
        check()


def gather_objects(fabric: Fabric | ClientParallelStrategy, value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks, on every rank; tensors of other ranks arrive on the CPU.

    Clients' rows are megabytes in each round, for which ``torch.distributed.all_gather_object`` takes three times as
    long.
    """
    if fabric.world_size == 1:
        return [value]
    strategy: Any = fabric if isinstance(fabric, Strategy) else fabric.strategy
    file = io.BytesIO()
    TensorPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    device = strategy.root_device if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(fabric.world_size)]
    meet(torch.distributed.all_gather, sizes, torch.tensor([len(mine)], device=device))
    longest = int(max(sizes))
    gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    meet(torch.distributed.all_gather, gathered, functional.pad(mine, (0, longest - len(mine))))
    return [
        value if rank == fabric.global_rank else pickle.loads(theirs.cpu().numpy().data)
        for rank, theirs in enumerate(gathered)
    ]


class TensorPickler(pickle.Pickler):
    """Pickler that writes a tensor as its bytes, to be read on the CPU; torch would write an archive per tensor."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild ``value`` if it is a tensor; other objects are pickled as usual."""
        if type(value) is not Tensor:
            return NotImplemented
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor_from, (content, value.dtype, value.shape)


def _tensor_from(content: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(content).view(dtype).reshape(shape)


def sum_over_ranks(fabric: Fabric, value: Tensor) -> Tensor:
    """Return the sum of ``value`` over all ranks, on every rank."""
    if fabric.world_size > 1:
        value = value.clone()
        meet(torch.distributed.all_reduce, value)
    return value
