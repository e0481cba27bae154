"""The batches of many clients, one from each at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.errors import NotVectorizableError
from fedbc_lightning.data.datasets import ArrayDataset, TensorPool, have_one_kind
from fedbc_lightning.data.loading import BYTES_AT_ONCE, BYTES_ON_GPU, ClientLoader, ClientLoaders
from fedbc_lightning.engines.recorded.recording import NotRecordableError

# Largest size in bytes of clients' own tensors that are copied into one tensor, anew in each round.
JOINED_BYTES = 2**28


class Stack(NamedTuple):
    """Batches of one size, stacked.

    Attributes:
        rows: Rows of the clients whose batches these are, int64 (k,).
        tensors: The stacked parts of the batches, (k, B, ...) each; (m, B, ...) with m > max(rows) if the stack is
            aligned. They are a list, or the named tuple that the batches are.
        size: Number of samples per batch, B.
        is_aligned: Whether entry i of the tensors belongs to row i of w, so that the weights need not be copied. The
            entries of rows that are not in ``rows`` hold any samples.
    """

    rows: np.ndarray
    tensors: Any
    size: int
    is_aligned: bool


# Step by step the number of clients that still train, and their batches by shape
StackedBatches = Iterator[tuple[int, list[Stack]]]


def like(batch: Any, parts: Iterable[Tensor]) -> Any:
    """Return tensors as the named tuple that a batch is, which the step may read by names, or as a list.

    Example:
        >>> Pair = NamedTuple("Pair", [("x", int), ("y", int)])
        >>> like(Pair(0, 0), iter([1, 2])), like((0, 0), iter([1, 2]))
        (Pair(x=1, y=2), [1, 2])
    """
    return getattr(type(batch), "_make", list)(parts)


def padded(num_rows: int, most: int) -> int:
    """Return the number of rows to compute on for ``num_rows`` of them: at most a quarter more, and at most ``most``.

    There are few such numbers, because each one is a shape of its own that the recorder must record.

    Example:
        >>> [padded(k, 30) for k in (1, 2, 5, 9, 17, 29)]
        [1, 2, 5, 10, 20, 30]
    """
    unit = 1 << max(0, (num_rows - 1).bit_length() - 3)
    return min(-(-num_rows // unit) * unit, most)


def stacked_batches(loaders: ClientLoaders, num_epochs: int, num_steps: Sequence[int]) -> StackedBatches:
    """Yield, step by step, the number of clients that are still training, and their batches by shape.

    Args:
        loaders: The loaders of K clients, those with the most steps first.
        num_epochs: Number of epochs that contain all the steps.
        num_steps: Number of steps of each client, descending.
    """
    pools = _pools(loaders)
    if pools is None:
        return _collected(loaders, num_epochs, np.asarray(num_steps))
    return _gathered(loaders, pools, num_epochs, np.asarray(num_steps))


class _Pools(NamedTuple):
    """The tensors in memory that K clients draw from.

    Attributes:
        pools: The different pools.
        start: First row of each client's pool if the pools stand one after another, int64 (K,).
    """

    pools: list[TensorPool]
    start: np.ndarray

    def tensors(self, device: torch.device | None) -> list[Tensor]:
        """Return the tensors of all pools, one pool after another."""
        parts = [pool.on(device) for pool in self.pools]
        return [column[0] if len(parts) == 1 else torch.cat(column) for column in zip(*parts, strict=True)]


def _pools(loaders: ClientLoaders) -> _Pools | None:
    """Return the pools, if all loaders draw alike from tensors in memory that are the same, or small enough to join."""
    first = loaders.datasets[0]
    if not isinstance(first, ArrayDataset) or (first.augment is not None and loaders[0].sampler.seed is not None):
        return None
    datasets: Any = loaders.datasets
    if not loaders.gathers or not have_one_kind(datasets):
        return None
    pool_of_each = [dataset.pool for dataset in datasets]
    pools = list(dict.fromkeys(pool_of_each))
    ends = np.cumsum(list(map(len, pools)))
    if len(pools) > 1 and ends[-1] * first.pool.sample_bytes > JOINED_BYTES:
        return None
    starts = np.append(0, ends[:-1])
    if len(pools) < len(pool_of_each):
        place = {pool: k for k, pool in enumerate(pools)}
        starts = starts[[place[pool] for pool in pool_of_each]]
    return _Pools(pools, starts)


def _gathered(loaders: ClientLoaders, pools: _Pools, num_epochs: int, num_steps: np.ndarray) -> StackedBatches:
    """Make the batches from tensors in memory: first the positions of all batches, then one gather per few steps."""
    datasets: Any = loaders.datasets
    device, batch_size = loaders[0].device, loaders[0].batch_size
    tensors = pools.tensors(device)
    sizes = loaders.sizes
    length = np.minimum(loaders.num_batches * batch_size, sizes)  # without the last batch if the loader drops it
    order = loaders.orders(num_epochs, length)
    if any(dataset.indices is not None for dataset in datasets):
        order = _own_rows(datasets)[order + _repeated(np.cumsum(sizes) - sizes, length * num_epochs)]
    order = upload(order + _repeated(pools.start, length * num_epochs), tensors[0].device)
    first = (np.cumsum(length) - length) * num_epochs
    per_epoch = -(-length // batch_size)
    within = np.arange(batch_size)
    bytes_per_row = sum(tensor[:1].nbytes for tensor in tensors) * batch_size
    step = 0
    while step < num_steps[0]:
        # One gather makes the batches of several steps, as many as fit into the cache: it costs less than one for each.
        active = int(np.searchsorted(-num_steps, -step))
        width = padded(active, len(loaders))
        most = max(1, (BYTES_AT_ONCE if tensors[0].is_cpu else BYTES_ON_GPU) // (bytes_per_row * width))
        steps = np.arange(step, min(step + most, num_steps[active - 1]))
        epochs, batch = np.divmod(np.minimum(steps[:, None], num_steps[:width] - 1), per_epoch[:width])
        offset = first[:width] + epochs * length[:width] + batch * batch_size
        sizes = np.minimum(batch_size, length[:width] - batch * batch_size)
        positions = upload(torch.from_numpy(offset[..., None] + np.minimum(within, sizes[..., None] - 1)), order.device)
        chosen = order.index_select(0, positions.reshape(-1))
        columns = datasets[0].gather(chosen, tensors, device)
        columns = [column.view(len(steps), width, batch_size, *column.shape[1:]) for column in columns]
        everybody = np.arange(active)
        all_full = (sizes[:, :active] == batch_size).all(axis=1).tolist()
        for k, batches in enumerate(zip(*columns, strict=True)):
            if all_full[k]:
                yield active, [Stack(everybody, list(batches), batch_size, is_aligned=True)]
            else:
                yield active, _by_size(batches, sizes[k, :active], batch_size)
        step += len(steps)


def gathered_whole(loaders: ClientLoaders | None) -> list[Tensor]:
    """Return the batches of K clients that have one batch of n samples each, in the order of the data, (K, n, ...).

    Args:
        loaders: The loaders of the clients, which do not shuffle; None if one of them has no data.

    Raises:
        NotRecordableError: The data do not have this form, or are not tensors in memory.
    """
    if loaders is None or (loaders.num_batches != 1).any() or (loaders.sizes != loaders.sizes[0]).any():
        raise NotRecordableError("their numbers of samples are not those that the data module tells")
    pools = _pools(loaders)
    if pools is None:
        raise NotRecordableError("their data are not tensors in memory of one kind")
    datasets: Any = loaders.datasets
    device, shape = loaders[0].device, (len(loaders), loaders[0].num_samples)
    tensors = pools.tensors(device)
    if len(pools.pools) == len(datasets) > 1 and not any(dataset.indices is not None for dataset in datasets):
        columns = datasets[0].finish(tensors, None, device)
    else:
        rows = _own_rows(datasets) + _repeated(pools.start, np.full(*shape))
        columns = datasets[0].gather(upload(rows, tensors[0].device), tensors, device)
    return [column.view(*shape, *column.shape[1:]) for column in columns]


def _own_rows(datasets: Sequence[ArrayDataset]) -> Tensor:
    """Return the chosen rows of each data set's tensors, one data set after another."""
    return torch.cat([torch.arange(len(d)) if d.indices is None else d.indices for d in datasets])


def _by_size(tensors: Sequence[Tensor], sizes: np.ndarray, batch_size: int) -> list[Stack]:
    """Return the stacks of one step from tensors (m, B, ...), of which row i fills its first ``sizes[i]`` places."""
    is_full = sizes == batch_size
    stacks = []
    left = np.arange(len(sizes))
    if 2 * is_full.sum() >= len(sizes):
        stacks.append(Stack(left[is_full], list(tensors), batch_size, is_aligned=True))
        left = left[~is_full]
    for size in np.unique(sizes[left])[::-1].tolist():
        rows = left[sizes[left] == size]
        chosen = upload(torch.from_numpy(rows), tensors[0].device)
        stacks.append(Stack(rows, [tensor[chosen, :size] for tensor in tensors], size, is_aligned=False))
    return stacks


def _repeated(values: np.ndarray, counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.repeat(values, counts))


def _collected(loaders: ClientLoaders, num_epochs: int, num_steps: np.ndarray) -> StackedBatches:
    """Make the batches from any loaders: each gives its next batch, and the batches of one shape are stacked."""

    def batches(loader: ClientLoader) -> Iterator[Any]:
        for epoch in range(num_epochs):
            loader.set_epoch(epoch)
            yield iter(loader)

    streams = [chain.from_iterable(batches(loader)) for loader in loaders]
    for step in range(int(num_steps[0])):
        active = int(np.searchsorted(-num_steps, -step))
        found: dict[tuple, list[tuple[int, Any]]] = {}
        for row, stream in enumerate(streams[:active]):
            batch = next(stream)
            if not isinstance(batch, (list, tuple)) or not all(isinstance(part, Tensor) for part in batch):
                raise NotVectorizableError(
                    f"stacks the tensors of batches, and these hold other things ({type(batch).__name__})"
                )
            found.setdefault(tuple(part.shape for part in batch), []).append((row, batch))
        groups = sorted(found.values(), key=len, reverse=True)
        yield active, [_stacked(group, padded(active, len(loaders)) if k == 0 else 0) for k, group in enumerate(groups)]


def _stacked(group: list[tuple[int, Any]], width: int) -> Stack:
    """Return one stack of batches by row; it is aligned, with ``width`` entries, if that is at most twice as many."""
    of_row = dict(group)
    is_aligned = 0 < width <= 2 * len(group)
    entries = [of_row.get(row, group[0][1]) for row in range(width)] if is_aligned else list(of_row.values())
    tensors = like(group[0][1], map(torch.stack, zip(*entries, strict=True)))
    return Stack(np.array(list(of_row)), tensors, len(group[0][1][0]), is_aligned)
