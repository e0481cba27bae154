"""``log_softmax`` over a few classes for many samples, with the kernel that is fast for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

MIN_SAMPLES = 1000
"""From so many on the copies are worth it."""
UNIT = 64
"""Samples come in multiples of this: a rest that fills no vector register would be worked on by scalar instructions,
which give other bits now and then."""
NUM_COMPARED = 2**14


def by_columns(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """``aten._log_softmax(x, dim, half_to_float)`` for ``dim`` the last one, (..., C).

    On a CPU, torch works on the last dimension row by row; where C numbers do not fill a vector register (16 float32
    with AVX-512), that is without vector instructions. Over the first dimension it works on many samples at once, which
    took a tenth of the time for 10 classes, and a quarter with the copies before and after.
    """
    return _like(x, torch._log_softmax(_columns(x), 0, half_to_float))


def backward_by_columns(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """``aten._log_softmax_backward_data`` of the same arguments, see :func:`by_columns`."""
    return _like(gradient, torch._log_softmax_backward_data(_columns(gradient), _columns(output), 0, dtype))


def _columns(x: Tensor) -> Tensor:
    """(..., C) as (C, M), with zeros after the samples."""
    rows = x.reshape(-1, x.shape[-1])
    columns = x.new_zeros(x.shape[-1], -(-len(rows) // UNIT) * UNIT)
    columns[:, : len(rows)] = rows.t()
    return columns


def _like(x: Tensor, columns: Tensor) -> Tensor:
    """The inverse of :func:`_columns`."""
    return columns[:, : x.shape[:-1].numel()].t().contiguous().view(x.shape)


REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    aten._log_softmax.default: by_columns,
    aten._log_softmax_backward_data.default: backward_by_columns,
}


def use_columns(graph: fx.Graph, device: torch.device) -> None:
    """Let a recorded graph use :func:`by_columns` where it gives the same bits.

    It does where torch's own kernel adds up one number after another, which is where it is slow.
    """
    for node in graph.nodes:
        replacement = REPLACEMENTS.get(node.target) if device.type == "cpu" else None
        if replacement is not None and _is_same(node, replacement):
            node.target = replacement


def _is_same(node: fx.Node, replacement: Callable[..., Tensor]) -> bool:
    """Whether it works on the last dimension of many samples, and the other way gives the same bits for random ones."""
    shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
    inputs = node.all_input_nodes
    dim, *rest = node.args[len(inputs) :]
    is_plain = all((n.meta["val"].shape, n.meta["val"].dtype) == (shape, dtype) for n in inputs)
    num_samples = shape[:-1].numel()
    if dim not in (-1, len(shape) - 1) or not is_plain or num_samples < MIN_SAMPLES:
        return False
    original: Any = node.target
    generator = torch.Generator().manual_seed(0)
    for _ in range(-(-NUM_COMPARED // num_samples)):
        values = [torch.randn(shape, dtype=dtype, generator=generator) for _ in inputs]
        values[1:] = [value.log_softmax(-1) for value in values[1:]]  # the backward pass has the output, too
        if not torch.equal(original(*values, dim, *rest), replacement(*values, dim, *rest)):
            return False
    return True
