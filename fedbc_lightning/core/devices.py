"""Differences between the devices that models are trained on (CPU, CUDA, MPS), hidden behind three functions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to ``device``, without waiting for the device except on MPS."""
    return values if values.device == device else values.to(device, non_blocking=device.type != "mps")


def read(values: Iterable[Tensor | float]) -> list[float]:
    """Return scalars as Python floats; those on a device are fetched together, so that the CPU waits for it once."""
    values = list(values)
    # Each read of a GPU's scalar waits for all of its work, and a round has one for each client and metric.
    there = {k: value for k, value in enumerate(values) if isinstance(value, Tensor) and not value.is_cpu}
    if there:
        dtype = wide_dtype(next(iter(there.values())).device)
        numbers = torch.stack([value.reshape(()).to(dtype) for value in there.values()]).tolist()
        for k, number in zip(there, numbers, strict=True):
            values[k] = number
    return list(map(float, values))


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over clients: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
