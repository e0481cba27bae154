"""A GPU where there is none: tensors of ``device.cpp``, and collectives that take what NCCL takes.

In a process of its own, before any backward pass: torch learns of devices once.
"""

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import Tensor, distributed

import fedbc_lightning.trainer.trainer
from fedbc_lightning.distributed.fabric import ClientParallelStrategy, make_fabric

NAME = "pretended"
SOURCE = Path(__file__).with_name("device.cpp")


def build(library: Path) -> None:
    """Compile it, in some ten seconds.

    Raises:
        FileNotFoundError: There is no compiler.
        subprocess.CalledProcessError: This torch has other internals.
    """
    here = Path(torch.__file__).parent
    include = [f"-I{here / 'include' / folder}" for folder in ("", "torch/csrc/api/include")]
    command = [
        "g++", "-shared", "-fPIC", "-O0", "-w", "-std=c++20", *include, str(SOURCE), "-o", str(library),
        f"-L{here / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)


def num_waits() -> int:
    """How often the CPU has waited for the device, in this process."""
    return torch.ops.test_device.num_waits()


class Module:
    """``torch.cuda``, as it were."""

    class device:  # noqa: N801
        def __init__(self, *arguments: Any) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *arguments: Any) -> None:
            pass

    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)
    _is_in_bad_fork = staticmethod(lambda: False)


class PretendedAccelerator(Accelerator):
    """As many as are asked for; all are one."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int) -> list[int]:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(NAME, 0) for _ in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


class PretendedStrategy(ClientParallelStrategy):
    def _get_process_group_backend(self) -> str:
        return f"cpu:gloo,{NAME}:gloo"

    def _determine_ddp_device_ids(self) -> None:
        return None


def use(library: Path) -> None:
    """Let every FederatedTrainer of this process, and of those that it starts, train on it.

    Args:
        library: Of :func:`build`.
    """
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module)
    torch.utils.generate_methods_for_privateuse1_backend()
    fedbc_lightning.run.trainer_attributes.make_fabric = _make_fabric
    for name in ("all_reduce", "all_gather"):
        setattr(distributed, name, partial(_as_nccl, getattr(distributed, name)))
    distributed.get_backend = lambda: "nccl"


def _make_fabric(accelerator: str, strategy: Any, devices: Any, num_nodes: int, precision: Any, _: int = 0) -> Fabric:
    found = make_fabric("cpu", strategy, devices, num_nodes, precision)
    if isinstance(found.strategy, ClientParallelStrategy):
        pretended: Any = PretendedStrategy(start_method=found.strategy._start_method)
    else:
        pretended = SingleDeviceStrategy(torch.device(NAME, 0))
    return Fabric(accelerator=PretendedAccelerator(), strategy=pretended, devices=found.world_size, precision=precision)


def _as_nccl(collective: Callable, *arguments: Any) -> None:
    """Takes contiguous tensors of the device alone; what it does is done by gloo."""

    def on_cpu(value: Any) -> Any:
        if isinstance(value, list):
            return [on_cpu(each) for each in value]
        assert value.device.type == NAME, f"NCCL takes no tensor of the {value.device}"
        assert value.is_contiguous(), "NCCL takes no tensor with gaps"
        return value.cpu()

    copies = [on_cpu(value) for value in arguments]
    collective(*copies)
    for value, copy in zip(arguments, copies, strict=True):
        if isinstance(value, Tensor):
            value.copy_(copy)
        else:
            for one, its_copy in zip(value, copy, strict=True):
                one.copy_(its_copy)
