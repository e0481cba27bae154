"""Devices that models are trained on (CPU, CUDA, MPS): their differences, and torch's deterministic algorithms."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

# Type of the setting `trainer.deterministic`
Asked = bool | Literal["warn"] | None

# Number of values of a vector that a CPU works on at once: with intermediate results in float64 they fit its cache
VALUES_AT_ONCE = 2**16


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as ``cpu`` or ``NVIDIA H100``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def tf32_used(device: torch.device, dtype: torch.dtype) -> str:
    """Return a note if a GPU rounds float32 to TF32, which has 10 bits, in some operations; else an empty text."""
    # torch 2.8 lacks fp32_precision; the older flags, which it has, raise errors where a user has set this one.
    used = {"matmuls": torch.backends.cuda.matmul, "convolutions": getattr(torch.backends.cudnn, "conv", None)}
    where = " and ".join(name for name, of in used.items() if getattr(of, "fp32_precision", "") == "tf32")
    return f" (TF32 in {where})" if where and device.type == "cuda" and dtype == torch.float32 else ""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to ``device``, without waiting for the device except on MPS."""
    return values if values.device == device else values.to(device, non_blocking=device.type != "mps")


def read(values: Iterable[Tensor | float]) -> list[float]:
    """Return scalars as Python floats; those on a device are fetched together, so that the CPU waits for it once."""
    values = list(values)
    # Each read of a GPU's scalar waits for all of its work, and a round has one for each client and metric.
    there: dict[torch.dtype, dict[int, Tensor]] = {}
    for k, value in enumerate(values):
        if isinstance(value, Tensor) and not value.is_cpu:
            there.setdefault(value.dtype, {})[k] = value.reshape(())
    if there:
        columns = [torch.stack(list(column.values())) for column in there.values()]
        dtype = wide_dtype(columns[0].device)
        numbers = torch.cat([column.to(dtype) for column in columns]).tolist()
        for k, number in zip(chain(*there.values()), numbers, strict=True):
            values[k] = number
    return list(map(float, values))


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over clients: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same few values of vectors (..., d), in order; on a GPU all values at once.

    Several operations on one piece after another take a tenth of the time of each operation on ten million values,
    because a CPU reads and writes the intermediate results in its cache.
    """
    size = VALUES_AT_ONCE if vectors[0].is_cpu else max(1, vectors[0].shape[-1])
    return zip(*(vector.split(size, dim=-1) for vector in vectors), strict=True)


def prepare_deterministic(asked: Asked) -> None:
    """Set the environment variable that cuBLAS reads before its first matrix product, if determinism is asked for."""
    if asked:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic_algorithms(asked: Asked) -> Iterator[None]:
    """Use deterministic algorithms inside the context, and restore torch's settings on leaving it.

    Args:
        asked: Value of ``trainer.deterministic``. With True, an operation without a deterministic algorithm is an
            error; with ``"warn"`` it causes a warning. None makes only cuDNN deterministic, False changes nothing.

    Raises:
        RuntimeError: ``asked`` is True, and an operation inside has no deterministic algorithm; raised by torch.
    """
    if asked is False:
        yield
        return
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    is_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        cudnn.deterministic, cudnn.benchmark = True, False  # a benchmark may choose another algorithm in another run
        if asked is not None:
            torch.use_deterministic_algorithms(True, warn_only=asked == "warn")
        yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark = flags
