"""Computes ``log_softmax`` over a few classes for many samples by the kernel that is fast for this shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from fedbc_lightning.core import private_torch

aten = torch.ops.aten

MIN_SAMPLES, MIN_CLASSES, MAX_CLASSES = 1000, 5, 16
"""Bounds of the shapes for which this pays: outside of them torch's own kernel is about as fast, or faster."""
UNIT = 64
"""The number of samples is filled up to a multiple of this: scalar instructions would compute a rest that fills no
vector register, and they give other bits now and then."""
AT_ONCE = 4096
"""Number of samples that are computed at a time, so that their copies stay in the cache."""
NUM_COMPARED = 2**15
"""Number of random samples of each scale whose results are compared with those of torch's kernel."""


def by_columns(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Compute ``aten._log_softmax(x, dim, half_to_float)`` over the last dimension of (..., C).

    On a CPU, torch works on the last dimension row by row; where C numbers do not fill a vector register (16 float32
    with AVX-512), that is without vector instructions. Over the first dimension it works on many samples at once, which
    takes a tenth of the time for 10 classes, and a fifth with the copies before and after (half, on the way back).
    """
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows, into in _blocks(x, result):
        into.copy_(private_torch.log_softmax(_columns(rows), 0, half_to_float)[:, : len(rows)].t())
    return result


def backward_by_columns(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Compute ``aten._log_softmax_backward_data`` in the manner of :func:`by_columns`."""
    result = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    for rows, outputs, into in _blocks(gradient, output, result):
        columns = private_torch.log_softmax_backward(_columns(rows), _columns(outputs), 0, dtype)
        into.copy_(columns[:, : len(rows)].t())
    return result


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors (..., C) as (number of samples, C), some samples at a time."""
    return zip(*[tensor.reshape(-1, tensor.shape[-1]).split(AT_ONCE) for tensor in tensors], strict=True)


def _columns(rows: Tensor) -> Tensor:
    """Return (M, C) as (C, M), with zeros after the samples."""
    num_samples, num_classes = rows.shape
    columns = rows.new_empty(num_classes, -(-num_samples // UNIT) * UNIT)
    columns[:, :num_samples] = rows.t()
    columns[:, num_samples:] = 0
    return columns


REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    private_torch.LOG_SOFTMAX: by_columns,
    private_torch.LOG_SOFTMAX_BACKWARD: backward_by_columns,
}


def use_columns(graph: fx.Graph, device: torch.device) -> None:
    """Let a recorded graph use :func:`by_columns` where it gives the same bits.

    The bits are the same where torch's own kernel adds up one number after another, which is also where it is slow.
    """
    if device.type != "cpu":
        return
    for node in graph.nodes:
        if node.target in REPLACEMENTS and _is_for_columns(node) and _is_same(node.target, *_kind(node)):
            node.target = REPLACEMENTS[node.target]


def _kind(node: fx.Node) -> tuple[int, torch.dtype]:
    return node.meta["val"].shape[-1], node.meta["val"].dtype


def _is_for_columns(node: fx.Node) -> bool:
    """Return whether an operation works on few classes of many samples, in the last dimension."""
    shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
    is_cast = any(source.meta["val"].dtype != dtype for source in node.all_input_nodes)
    dim = node.args[-2]
    is_last = dim in (-1, len(shape) - 1)
    is_few = MIN_CLASSES <= shape[-1] <= MAX_CLASSES
    return is_last and not is_cast and is_few and shape[:-1].numel() >= MIN_SAMPLES


@cache
def _is_same(target: Any, num_classes: int, dtype: torch.dtype) -> bool:
    """Return whether the replacement gives the same bits on this machine, for numbers of several scales and -inf."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 5.0, 30.0):
        shape = NUM_COMPARED + 1, num_classes
        x = scale * torch.randn(shape, dtype=dtype, generator=generator, device="cpu")
        x[::7, 0] = -torch.inf
        arguments: tuple[Any, ...] = (x, 1, False)
        if target is private_torch.LOG_SOFTMAX_BACKWARD:
            gradient = torch.randn(shape, dtype=dtype, generator=generator, device="cpu")
            arguments = (gradient, x.log_softmax(1), 1, dtype)
        if not torch.equal(target(*arguments).nan_to_num(), REPLACEMENTS[target](*arguments).nan_to_num()):
            return False
    return True
