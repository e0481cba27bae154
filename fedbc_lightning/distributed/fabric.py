"""Fabric for clients in parallel: each rank trains its own clients, and ranks exchange results once per round."""

from __future__ import annotations

import atexit
import io
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore
from torch.nn import functional

from fedbc_lightning.core import private_torch
from fedbc_lightning.core.errors import ConfigurationError, in_one_line
from fedbc_lightning.core.private_lightning import LaunchedStrategy, UnpatchedFabric, start_method
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

    def setup_environment(self) -> None:
        """Join the process group, and leave it when Python exits; gloo's threads would abort the process otherwise."""
        if start_method(self) == "fork":
            torch.set_num_threads(1)  # OpenMP's other threads do not survive a fork: the first shared loop would hang
        self._timeout = timedelta(seconds=SECONDS_TO_MEET)
        super().setup_environment()
        private_torch.set_group_timeout(LONGEST_ROUND)
        atexit.register(leave_process_group)

    def meet(self) -> Store:
        """Wait for the other processes, and return a store that all of them have found.

        Raises:
            ConfigurationError: Not all came in time, or one that this process has started has ended.
        """
        environment: Any = self.cluster_environment
        rank, in_all, port = environment.global_rank(), environment.world_size(), environment.main_port
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's, which holds the store
        is_local = in_all == self.num_processes
        host = "127.0.0.1" if is_local and not has_agent else environment.main_address
        if is_local:
            # gloo would listen at the address of this machine's name; on Windows it calls interfaces other names
            if hasattr(os, "fork"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", min(socket.if_nameindex())[1])
        elif environment.local_rank() == 0 and launched() is None:
            said = (
                f"this is node {environment.node_rank()}, waiting at {host}:{port} for the others, {in_all} processes"
            )
            place = f"MASTER_ADDR={host} MASTER_PORT={port} NODE_RANK=..."
            print(f"{said} in all. On each machine start the same command with {place}", file=sys.stderr, flush=True)
        mine, until = uuid4().hex, time.monotonic() + SECONDS_TO_MEET
        store = _open_store(host, port, is_local=is_local) if rank == 0 and not has_agent else None
        missing, ended, started = [0], list[int](), getattr(self.launcher, "started", ())
        # A loop of Python's, because no signal ends a wait of torch's, and torch does not tell who is missing.
        while time.monotonic() < until and not ended:
            if store is None:
                with suppress(OSError):  # nobody listens yet, for which torch's store would print its stack
                    socket.create_connection((host, port), 1.0).close()
                    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
            if store is not None:
                with suppress(torch.distributed.DistError):  # process 0 has ended
                    missing = _absent(store, mine, rank, in_all)
                    if not missing:
                        return PrefixStore(store.get("here/0").decode(), store)
            ended = [k for k, process in enumerate(started, start=1) if process.poll() is not None]
            time.sleep(0.05)
        why = f"did not come to {host}:{port} in {SECONDS_TO_MEET:g} s. Start all of them again."
        if ended:
            why = f"ended with status {started[ended[0] - 1].returncode} before the run began."
        for process in started:
            process.terminate()
        who = f"process {' and '.join(map(str, ended or missing))} of {in_all} (counted from 0)"
        raise ConfigurationError(f"trainer.devices: {who} {why}")

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


def _absent(store: Store, mine: str, rank: int, in_all: int) -> list[int]:
    """Say that this process is here, and return those that are not, or do not know yet that all are.

    The store of an agent outlives the processes, and no count of restarts is the same for all agents. So all have come
    once all have read the same names, of which each process makes its own anew.
    """
    here, seen = ([f"{what}/{k}" for k in range(in_all)] for what in ("here", "seen"))
    store.set(here[rank], mine)
    if absent := [k for k in range(in_all) if not store.check([here[k]])]:
        return absent
    names = b" ".join(store.multi_get(here)).decode()
    store.set(seen[rank], names)
    return [k for k in range(in_all) if not store.check([seen[k]]) or store.get(seen[k]).decode() != names]


def _open_store(host: str, port: int, *, is_local: bool) -> Store:
    """Return a new store; that of processes of one machine listens at its address alone, torch's own at all.

    Raises:
        ConfigurationError: The port is taken.
    """
    with in_one_line(f"MASTER_PORT: cannot listen at {host}:{port}: ", "."):
        own = dict[str, Any]()
        if is_local:  # libuv's server takes no socket that listens already
            own = {"master_listen_fd": socket.create_server((host, port)).detach(), "use_libuv": False}
        return TCPStore(host, port, is_master=True, wait_for_workers=False, **own)


def launched() -> tuple[str, int, int] | None:
    """Return who has started the processes, how many on each machine, and on how many; None without a launcher."""
    if TorchElasticEnvironment.detect():
        who, in_all, here = "torchrun", *(int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        nodes = in_all // here
    elif SLURMEnvironment.detect() and "SLURM_STEP_NUM_TASKS" in os.environ:  # srun's; a batch script is one process
        who, in_all, nodes = "SLURM", *(int(os.environ[f"SLURM_STEP_NUM_{what}"]) for what in ("TASKS", "NODES"))
        here = in_all // nodes
    else:
        return None
    if here * nodes != in_all:
        raise ConfigurationError(f"{who}: {here} of {in_all} processes are here; each machine needs as many.")
    return who, here, nodes


def make_fabric(
    accelerator: str,
    strategy: str | Strategy,
    devices: Any,
    num_nodes: int | str,
    precision: str,
    max_restarts: int = 0,
) -> Fabric:
    """Return a Fabric whose strategy is a single device or :class:`ClientParallelStrategy`.

    Raises:
        ConfigurationError: The strategy shards the model (FSDP, DeepSpeed, ...), Fabric refuses the settings, or a
            launcher has started other processes than are asked for.
    """
    given, (who, each, nodes) = (devices, num_nodes), launched() or ("", devices, 1)
    devices, num_nodes = (each if devices == "auto" else devices), (nodes if num_nodes == "auto" else num_nodes)
    settings = {"devices": devices, "num_nodes": num_nodes, "precision": precision}
    make = partial(UnpatchedFabric, accelerator=accelerator, **settings)
    try:
        fabric = make(strategy=strategy)
        if isinstance(fabric.strategy, DDPStrategy) and not isinstance(fabric.strategy, ClientParallelStrategy):
            method: Any = START_METHODS.get(str(strategy), start_method(fabric.strategy))
            is_external = getattr(fabric.strategy.cluster_environment, "creates_processes_externally", True)
            if max_restarts and strategy == "auto" and method == "popen" and not is_external:
                method = "spawn"  # by a process that takes no part in the run, and can start it again
            fabric = make(strategy=ClientParallelStrategy(start_method=method))
    except Exception as error:
        raise ConfigurationError(f"trainer.accelerator / strategy / devices / precision: {error}") from error
    if not isinstance(fabric.strategy, (SingleDeviceStrategy, ClientParallelStrategy)):
        raise ConfigurationError(
            f"trainer.strategy: {type(fabric.strategy).__name__} splits or synchronises one model over devices, but "
            f"here each device trains whole clients; use auto, {', '.join(START_METHODS)}."
        )
    asked = getattr(fabric.strategy, "num_processes", 1), num_nodes
    is_alone = asked == (1, 1) and "auto" not in given  # a run that each process makes for itself
    if who and asked != (each, nodes) and not is_alone:
        raise ConfigurationError(
            f"trainer.devices / num_nodes: {asked[0]} on each of {asked[1]} machines, but {who} has started {each} "
            f"on each of {nodes}; leave both out."
        )
    return fabric


def meet(collective: Callable[..., Any], *arguments: Any) -> None:
    """Call a collective of ``torch.distributed``; a signal ends the wait for the other processes.

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
            # While torch waits, Python handles no signal: so it waits for a moment again and again.
            work.wait(timedelta(seconds=0.25))
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
