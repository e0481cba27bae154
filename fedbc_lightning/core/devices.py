"""What is peculiar to the devices that models are trained on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU on a device, which meanwhile goes on with what it does; MPS alone must be waited for."""
    return values if values.device == device else values.to(device, non_blocking=device.type != "mps")


def read(values: Iterable[Tensor | float]) -> list[float]:
    """Single numbers and truth values, for which the CPU waits once wherever they are."""
    values = list(values)
    there = {k: value for k, value in enumerate(values) if isinstance(value, Tensor) and not value.is_cpu}
    if there:
        dtype = wide_dtype(next(iter(there.values())).device)
        numbers = torch.stack([value.reshape(()).to(dtype) for value in there.values()]).tolist()
        for k, number in zip(there, numbers, strict=True):
            values[k] = number
    return list(map(float, values))


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype that sums over clients are taken in: float64, which MPS does not have."""
    return torch.float32 if device.type == "mps" else torch.float64
