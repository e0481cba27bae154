"""Fabric for clients in parallel: ranks train disjoint clients and meet once per round."""

from __future__ import annotations

import atexit
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from fedbc_lightning.errors import ConfigurationError

START_METHODS = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")


class ClientParallelStrategy(DDPStrategy):
    """DDP's launcher, process group and devices without its gradient synchronisation.

    Plain DDP averages gradients across clients, hangs on unequal step counts, and swaps in a DistributedSampler.
    """

    def setup_environment(self) -> None:
        """Also leave the process group when the process ends: gloo's threads would abort it."""
        super().setup_environment()
        atexit.register(_leave_process_group)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """The module itself: gradients stay with their client."""
        return module

    @property
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """No distributed sampler: every rank sees all of its clients' data."""
        return


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
            return Fabric(devices=devices, strategy=strategy, **settings)
        fabric = Fabric(devices=devices, strategy=strategy, **settings)
    except Exception as error:
        raise ConfigurationError(f"trainer.accelerator / devices / precision: {error}") from error
    if isinstance(fabric.strategy, DDPStrategy):
        start_method = START_METHODS.get(str(strategy), fabric.strategy._start_method)
        parallel = ClientParallelStrategy(start_method=start_method)  # type: ignore[arg-type]
        return Fabric(devices=devices, strategy=parallel, **settings)
    if not isinstance(fabric.strategy, SingleDeviceStrategy):
        raise ConfigurationError(
            f"trainer.accelerator: {accelerator} would use {type(fabric.strategy).__name__}, which is not supported."
        )
    return fabric


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def gather_objects(fabric: Fabric, value: Any) -> list[Any]:
    """Every rank's ``value``, in the order of ranks, on every rank."""
    if fabric.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def sum_over_ranks(fabric: Fabric, value: Tensor) -> Tensor:
    """The sum of every rank's tensor."""
    return value if fabric.world_size == 1 else fabric.all_reduce(value, reduce_op="sum")  # type: ignore[return-value]
