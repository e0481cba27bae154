"""Fabric for clients in parallel: ranks train disjoint clients and meet once per round."""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _destroy_dist_connection, _set_num_threads_if_needed
from torch import Tensor, nn
from torch.nn import functional

from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.distributed import joining
from fedbc_lightning.distributed.meeting import meet

Value = TypeVar("Value")
START_METHODS = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")
LONGEST_ROUND = timedelta(days=7)
"""How long a process may wait for another's clients; a dead one is found out by the lifeline, not by a timeout."""

FEW_RANKS = 4

PARENT = "FEDBC_LIGHTNING_PARENT"
"""Environment variable: the process that started this one."""


class ClientParallelStrategy(DDPStrategy):
    """DDP's launcher, process group and devices without its gradient synchronisation.

    Plain DDP averages gradients across clients, hangs on unequal step counts, and swaps in a DistributedSampler.
    """

    _is_joined = False

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            self._launcher = WatchingLauncher(self)

    def setup_environment(self) -> None:
        """Join the other processes, and leave them when this one ends: gloo's threads would abort it."""
        parent = os.environ.pop(PARENT, None)
        if parent is not None:
            threading.Thread(target=self._watch_parent, args=(int(parent),), daemon=True).start()
        if self._start_method == "fork":
            torch.set_num_threads(1)  # OpenMP's other threads do not survive a fork: the first shared loop would hang
        self._timeout = timedelta(seconds=joining.SECONDS_TO_MEET)
        with joining.joining(self):
            super().setup_environment()
        self._is_joined = True
        distributed: Any = torch.distributed  # the public name came after 2.10
        set_timeout = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
        set_timeout(LONGEST_ROUND)
        atexit.unregister(_destroy_dist_connection)  # Lightning's, with NCCL, waits for ever where others are lost
        atexit.register(leave_process_group)

    def _watch_parent(self, parent: int) -> None:
        """End this process where its parent dies before they have met."""
        while not self._is_joined:
            if os.getppid() != parent:
                os._exit(1)
            time.sleep(0.5)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait until all processes are here."""
        if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "nccl":
            super().barrier(*args, **kwargs)
        else:
            meet(torch.distributed.all_reduce, torch.zeros(1))

    def broadcast(self, obj: Value, src: int = 0) -> Value:
        """Return rank ``src``'s object on every rank."""
        if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "nccl":
            return super().broadcast(obj, src)
        content = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        meet(torch.distributed.broadcast, size, src)
        if self.global_rank != src:
            content = torch.empty(int(size), dtype=torch.uint8)
        meet(torch.distributed.broadcast, content, src)
        return obj if self.global_rank == src else pickle.loads(content.numpy().data)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """The module itself: gradients stay with their client."""
        return module

    @property
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """No distributed sampler: every rank sees all of its clients' data."""
        return


class WatchingLauncher(_SubprocessScriptLauncher):
    """Starts this command once more for each further process, and ends all of them if one does not arrive.

    Lightning's own watches them to the end, and kills this process without a word where one fails.
    """

    def __init__(self, strategy: ClientParallelStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Start the other processes, and run the function here."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[PARENT]
            threading.Thread(target=self._watch_arrival, daemon=True).start()
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)

    def _watch_arrival(self) -> None:
        while not self._strategy._is_joined:
            for rank, process in enumerate(self.procs, start=1):
                if process.poll() is not None:
                    self._give_up(rank, process)
            time.sleep(0.1)

    def wake(self) -> None:
        """Let processes go on that somebody has stopped, so that they see the end of the run, and end."""
        for process in self.procs:
            if hasattr(signal, "SIGCONT"):
                process.send_signal(signal.SIGCONT)  # nothing where it has ended

    def _give_up(self, rank: int, ended: subprocess.Popen) -> None:
        how = f"by signal {-ended.returncode}" if ended.returncode < 0 else f"with status {ended.returncode}"
        print(
            f"error: process {rank} of {self.num_processes} (counted from 0) ended {how} before the run began, see its "
            "own message. All others were stopped.", file=sys.stderr, flush=True,
        )  # fmt: skip
        for process in self.procs:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        os._exit(1)


class ClientParallelFabric(Fabric):
    """Fabric that leaves DataLoader as torch made it.

    Fabric replaces its methods while a function runs, so that ``setup_dataloaders``, which nothing here calls, can make
    loaders anew. Each loader of each client then takes ten times as long to make, and where the function fails the
    methods stay replaced, once more by each failure.
    """

    def _wrap_with_setup(self, to_run: Callable, *args: Any, **kwargs: Any) -> Any:
        self._strategy.setup_environment()
        return to_run(*args, **kwargs)


@contextmanager
def missing_kernels_told(precision: str) -> Iterator[None]:
    """Say what torch lacks in a precision on this processor, such as LSTMs in bfloat16 on x86 without AVX-512.

    Raises:
        ConfigurationError: An operation inside met that.
    """
    try:
        yield
    except RuntimeError as error:
        said = first_line(error).partition(".")[0]
        if precision == "32-true" or not said.startswith("could not create a primitive"):
            raise
        raise ConfigurationError(
            f"trainer.precision: torch cannot compute this model in {precision} on this processor ({said}); use "
            "32-true."
        ) from error


def make_fabric(
    accelerator: str, strategy: str | Strategy, devices: Any, num_nodes: int, precision: str
) -> Fabric:  # fmt: skip
    """A Fabric whose strategy is a single device or :class:`ClientParallelStrategy`.

    Raises:
        ConfigurationError: A strategy that shards the model (FSDP, DeepSpeed, ...), or an unknown one or precision.
    """
    if precision not in PRECISIONS:
        raise ConfigurationError(f"trainer.precision: got '{precision}'; choose one of {', '.join(PRECISIONS)}.")
    allowed = isinstance(strategy, ClientParallelStrategy) or strategy == "auto" or strategy in START_METHODS
    if not allowed:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise ConfigurationError(
            f"trainer.strategy: '{name}' splits or synchronises one model over devices, but here each device trains "
            f"whole clients; use auto, {', '.join(START_METHODS)}."
        )
    settings: dict[str, Any] = {"accelerator": accelerator, "num_nodes": num_nodes, "precision": precision}
    try:
        if isinstance(strategy, Strategy):
            return ClientParallelFabric(devices=devices, strategy=strategy, **settings)
        fabric = ClientParallelFabric(devices=devices, strategy=strategy, **settings)
    except Exception as error:
        raise ConfigurationError(f"trainer.accelerator / devices / precision: {error}") from error
    if isinstance(fabric.strategy, DDPStrategy):
        start_method = START_METHODS.get(str(strategy), fabric.strategy._start_method)
        parallel = ClientParallelStrategy(start_method=start_method)  # type: ignore[arg-type]
        return ClientParallelFabric(devices=devices, strategy=parallel, **settings)
    if not isinstance(fabric.strategy, SingleDeviceStrategy):
        raise ConfigurationError(
            f"trainer.accelerator: {accelerator} would use {type(fabric.strategy).__name__}, which is not supported."
        )
    return fabric


def leave_process_group(seconds: int = 0) -> None:
    """Leave it before Python ends, which gloo's threads would otherwise abort.

    Args:
        seconds: After so many the process ends by SIGALRM: what was begun together with a process that is stopped or
            dead may never end. 0: never.
    """
    has_limit = seconds > 0 and hasattr(signal, "alarm")
    if torch.distributed.is_initialized():
        if has_limit:
            signal.alarm(seconds)
        torch.distributed.destroy_process_group()
        if has_limit:
            signal.alarm(0)


def gather_objects(fabric: Fabric, value: Any) -> list[Any]:
    """Every rank's ``value``, in the order of ranks, on every rank; tensors in it arrive on the CPU.

    Clients' rows are megabytes in each round: ``torch.distributed.all_gather_object`` takes three times as long.
    """
    if fabric.world_size == 1:
        return [value]
    file = io.BytesIO()
    TensorPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    device = fabric.device if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
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
    """Pickles tensors as their bytes, from the CPU to the CPU; torch's own way makes a small archive of each."""

    def reducer_override(self, value: Any) -> Any:
        """See :class:`pickle.Pickler`."""
        if type(value) is not Tensor:
            return NotImplemented
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor_from, (content, value.dtype, value.shape)


def _tensor_from(content: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(content).view(dtype).reshape(shape)


def travels_along(fabric: Fabric) -> bool:
    """Whether sums go with what is gathered anyhow: between a few CPUs one exchange takes less time than two."""
    return fabric.world_size <= FEW_RANKS and torch.distributed.get_backend() == "gloo"


def sum_over_ranks(fabric: Fabric, value: Tensor) -> Tensor:
    """The sum of every rank's tensor."""
    if fabric.world_size > 1:
        value = value.clone()
        meet(torch.distributed.all_reduce, value)
    return value


def runs_elsewhere(fabric: Fabric) -> bool:
    """Return whether every process of the run is a fork or spawned, and the caller itself trains nothing."""
    return getattr(fabric.strategy, "_start_method", "popen") != "popen"
