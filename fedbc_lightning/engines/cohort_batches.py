"""The batches of many clients, one from each at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.datasets import ArrayDataset
from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.loading import ClientLoader


class Stack(NamedTuple):
    """Batches of one shape.

    Attributes:
        rows: Whose they are, int64 (k,).
        tensors: Each (k, B, ...).
        size: B.
    """

    rows: Tensor
    tensors: list[Tensor]
    size: int


def stacked_batches(
    loaders: Sequence[ClientLoader], num_epochs: int, num_steps: Sequence[int]
) -> Iterator[tuple[int, list[Stack]]]:
    """Step by step: the number of clients that are still at it, and their batches, by shape.

    Args:
        loaders: Of K clients, those with the most steps first.
        num_epochs: Epochs that hold all the steps.
        num_steps: Of each client, descending.
    """
    gathers = all(
        loader.gathers and isinstance(loader.dataset, ArrayDataset) and loader.dataset.augment is None
        for loader in loaders
    )
    return (_gathered if gathers else _collected)(loaders, num_epochs, np.asarray(num_steps))


def _gathered(
    loaders: Sequence[ClientLoader], num_epochs: int, num_steps: np.ndarray
) -> Iterator[tuple[int, list[Stack]]]:
    """From tensors in memory: positions of all batches first, then one gather for every stack."""
    datasets: list[Any] = [loader.dataset for loader in loaders]
    device = loaders[0].device
    pools = {id(dataset.pool): dataset.pool for dataset in datasets}
    starts, parts = dict[int, int](), list[tuple[Tensor, ...]]()
    num_rows = 0
    for key, pool in pools.items():
        starts[key], num_rows = num_rows, num_rows + len(pool)
        parts.append(pool.on(device))
    tensors = [parts[0][k] if len(parts) == 1 else torch.cat([part[k] for part in parts]) for k in range(len(parts[0]))]
    batch_size = loaders[0].batch_size
    orders, lengths = [], []
    for loader, dataset in zip(loaders, datasets, strict=True):
        lengths.append(min(len(loader) * batch_size, loader.num_samples))  # of an epoch, without what is dropped
        for epoch in range(num_epochs):
            loader.set_epoch(epoch)
            orders.append(dataset.rows(loader.sampler.order())[: lengths[-1]] + starts[id(dataset.pool)])
    order = torch.cat(orders).to(tensors[0].device)
    length = np.array(lengths)
    first = (np.cumsum(length) - length) * num_epochs
    per_epoch = -(-length // batch_size)
    within = torch.arange(batch_size, device=order.device)
    transform = datasets[0].transform
    for step in range(int(num_steps[0])):
        active = int(np.searchsorted(-num_steps, -step))
        epochs, batch = np.divmod(step, per_epoch[:active])
        offset = first[:active] + epochs * length[:active] + batch * batch_size
        sizes = np.minimum(batch_size, length[:active] - batch * batch_size)
        stacks = []
        for size in np.unique(sizes)[::-1].tolist():
            rows = np.flatnonzero(sizes == size)
            positions = torch.from_numpy(offset[rows]).to(order.device)[:, None] + within[:size]
            chosen = order[positions.reshape(-1)]
            columns = [tensor.index_select(0, chosen) for tensor in tensors]
            if device is not None and columns[0].device != device:
                columns = [column.to(device, non_blocking=True) for column in columns]
            if transform is not None:
                columns[0] = transform(columns[0])
            stacked = [column.view(len(rows), size, *column.shape[1:]) for column in columns]
            stacks.append(Stack(torch.from_numpy(rows), stacked, size))
        yield active, stacks


def _collected(
    loaders: Sequence[ClientLoader], num_epochs: int, num_steps: np.ndarray
) -> Iterator[tuple[int, list[Stack]]]:
    """From any loaders: each gives its next batch, and those of one shape are stacked."""

    def batches(loader: ClientLoader) -> Iterator[Any]:
        for epoch in range(num_epochs):
            loader.set_epoch(epoch)
            yield iter(loader)

    streams = [chain.from_iterable(batches(loader)) for loader in loaders]
    for step in range(int(num_steps[0])):
        active = int(np.searchsorted(-num_steps, -step))
        found: dict[tuple, list[tuple[int, list[Tensor]]]] = {}
        for row, stream in enumerate(streams[:active]):
            batch = next(stream)
            if not isinstance(batch, (list, tuple)) or not all(isinstance(part, Tensor) for part in batch):
                raise ConfigurationError(
                    "trainer.engine: vectorized stacks the tensors of batches, and these hold other things "
                    f"({type(batch).__name__}); use engine: sequential."
                )
            found.setdefault(tuple(part.shape for part in batch), []).append((row, list(batch)))
        yield (
            active,
            [
                Stack(
                    torch.tensor([row for row, _ in group]),
                    [torch.stack(parts) for parts in zip(*(batch for _, batch in group), strict=True)],
                    len(group[0][1][0]),
                )
                for group in found.values()
            ],
        )
