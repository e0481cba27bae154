"""Batches of one client: made in microseconds from tensors in memory, else by torch's DataLoader, in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from fedbc_lightning.core import seeding
from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.data.datasets import ArrayDataset, BatchTransformDataset, num_items

BYTES_AT_ONCE = 2**20
"""Of in-memory samples that are gathered together."""


class EpochSampler(Sampler[int]):
    """The order of one client's samples in the current epoch: a function of (seed, round, client, epoch).

    Args:
        num_samples: n.
        seed: The run's seed; None: the order of the data set, as for evaluation.
        round: 1..T.
        client: 0..N-1.
        shuffle: False: the order of the data set, in training too.
    """

    def __init__(
        self, num_samples: int, seed: int | None = None, round: int = -1, client: int = -1, *, shuffle: bool = True
    ) -> None:
        self.num_samples = num_samples
        self.seed, self.round, self.client = seed, round, client
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0."""
        self.epoch = epoch

    def order(self) -> Tensor:
        """Positions of the samples in the order of this epoch, int64 ``(n,)``."""
        if self.seed is None or not self.shuffle:
            return torch.arange(self.num_samples)
        return seeding.permutation(self.num_samples, self.seed, "shuffle", self.round, self.client, self.epoch)

    def generator(self, purpose: str, step: int = -1) -> torch.Generator:
        """For what is drawn in this epoch, or one step of it, besides the order, e.g. ``"augment"``."""
        return seeding.generator(self.seed or 0, purpose, self.round, self.client, self.epoch, step)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def __len__(self) -> int:
        return self.num_samples


class ClientLoader:
    """The batches of one data set; each is a list ``[inputs, targets]``, as ``default_collate`` gives.

    An :class:`~fedbc_lightning.data.datasets.ArrayDataset` takes the in-memory path: no object is made per sample, no
    DataLoader at all. Everything else goes through torch's DataLoader, which gives the same batches in the same order.
    lightning.Trainer takes it as it is, and shuffles anew in each epoch through :attr:`sampler`.

    Args:
        dataset: Map-style.
        batch_size: Samples per batch; the last batch of an epoch holds the rest.
        sampler: Order of the samples; one with a seed also means training: inputs are augmented.
        drop_last: Leave out a last batch that is not full.
        device: Where in-memory batches are wanted; None: where the tensors lie. What a DataLoader
            makes of a user's own data set stays on the CPU.
        options: More arguments of the DataLoader; one with ``collate_fn`` always makes one.

    Attributes:
        dataset: As given.
        batch_size: As given.
        sampler: As given.
    """

    batch_sampler = None  # lightning.Trainer looks for it

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        sampler: EpochSampler | None = None,
        *,
        drop_last: bool = False,
        device: torch.device | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.sampler = EpochSampler(num_items(dataset)) if sampler is None else sampler
        self.drop_last = drop_last
        self.device = device
        self._options = options or {}

    @property
    def num_samples(self) -> int:
        """Samples of the data set (those of a dropped last batch included)."""
        return self.sampler.num_samples

    @property
    def gathers(self) -> bool:
        """Whether batches are gathered from tensors in memory."""
        return isinstance(self.dataset, ArrayDataset) and "collate_fn" not in self._options

    @property
    def gathers_plainly(self) -> bool:
        """Whether batches are the samples of tensors in memory, as they are."""
        dataset = self.dataset
        return self.gathers and dataset.transform is None and dataset.augment is None  # type: ignore[attr-defined]

    @property
    def code_between(self) -> list[Any]:
        """Datasets, transforms and the like whose code runs whenever a batch is made."""
        if not self.gathers:
            return [self.dataset, self._options]
        dataset: Any = self.dataset
        parts = (self.sampler, dataset, dataset.pool, dataset.transform, dataset.augment)
        return [part for part in parts if part is not None]

    def __len__(self) -> int:
        """Batches per epoch."""
        return num_batches(self.sampler.num_samples, self.batch_size, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, whose batches come next."""
        self.sampler.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.dataset, ArrayDataset) and self.gathers:
            return self._gathered(self.dataset)
        if isinstance(self.dataset, BatchTransformDataset) and "collate_fn" not in self._options:
            return self._finished(self.dataset)
        return iter(self._dataloader(self.dataset))

    def _gathered(self, dataset: ArrayDataset) -> Iterator[list[Tensor]]:
        tensors = dataset.pool.on(self.device)
        device = None if self.device == tensors[0].device else self.device
        rows = upload(dataset.rows(self.sampler.order()), tensors[0].device)
        if self.drop_last:
            rows = rows[: len(self) * self.batch_size]
        is_plain = device is None and self.gathers_plainly
        step = 0
        # A few batches are gathered at once, and cut: one operation for many of them while they fit into the cache.
        for chunk in _cut(
            rows, max(1, BYTES_AT_ONCE // (dataset.pool.sample_bytes * self.batch_size)) * self.batch_size
        ):
            columns = [_cut(tensor.index_select(0, chunk), self.batch_size) for tensor in tensors]
            for batch in zip(*columns, strict=True):
                if is_plain:
                    yield list(batch)
                else:
                    yield dataset.finish(list(batch), self._augment_generator(dataset, step), device)
                step += 1

    def _finished(self, dataset: BatchTransformDataset) -> Iterator[list[Tensor]]:
        for step, batch in enumerate(self._dataloader(dataset.raw)):
            yield dataset.finish(batch, self._augment_generator(dataset, step), self.device)

    def _augment_generator(self, dataset: ArrayDataset | BatchTransformDataset, step: int) -> torch.Generator | None:
        is_augmented = dataset.augment is not None and self.sampler.seed is not None
        return self.sampler.generator("augment", step) if is_augmented else None

    def _dataloader(self, dataset: Dataset) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=self.sampler,
            drop_last=self.drop_last,
            generator=self.sampler.generator("workers"),
            **{"collate_fn": _stack, **self._options},
        )


def _cut(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """``tensor.split(size)``; where one part is all, without that call, which costs as much as a gather of a batch."""
    return (tensor,) if tensor.size(0) <= size else tensor.split(size)


def _stack(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"data: samples cannot be stacked into a batch ({first_line(error)}); give data.collate_fn, which makes a "
            "batch of a list of samples"
        ) from error


def batches_of_each(loaders: Sequence[ClientLoader]) -> np.ndarray:
    """Batches per epoch of each, int64 (K,)."""
    return np.array([len(loader) for loader in loaders])


def num_batches(num_samples: int, batch_size: int, drop_last: bool = False) -> int:
    """Batches per epoch of ``num_samples``.

    Example:
        >>> num_batches(10, 4), num_batches(10, 4, drop_last=True)
        (3, 2)
    """
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)
