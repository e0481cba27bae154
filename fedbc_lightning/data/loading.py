"""Batches of one client or of many: gathered in microseconds from tensors in memory, or made by torch's DataLoader."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, count, repeat
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from fedbc_lightning.core import seeding
from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.main_guard import check_main_guard
from fedbc_lightning.data.datasets import ArrayDataset, is_gathered, num_items

Number = TypeVar("Number", int, np.ndarray)
# Bytes of in-memory samples that one operation gathers, for several batches if they are small: they fit a CPU's cache,
# and on a GPU, where each operation costs a launch, they are an epoch of most clients
BYTES_AT_ONCE, BYTES_ON_GPU = 2**20, 2**26


class EpochSampler(Sampler[int]):
    """Orders one client's samples in the current epoch, as a function of (seed, round, client, epoch).

    Args:
        num_samples: Number of samples n.
        seed: Seed of the run; with None samples come in the order of the data set, as for evaluation.
        round: Round 1..T.
        client: Client 0..N-1.
        shuffle: Whether samples are shuffled in training.
    """

    def __init__(
        self, num_samples: int, seed: int | None = None, round: int = -1, client: int = -1, *, shuffle: bool = True
    ) -> None:
        self.num_samples = num_samples
        self.seed, self.round, self.client = seed, round, client
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the current epoch, from 0."""
        self.epoch = epoch

    def order(self) -> Tensor:
        """Return the positions of the samples in the order of this epoch, int64 ``(n,)``."""
        return self.order_of(self.num_samples, self.client, self.epoch)

    def order_of(self, num_samples: int, client: int, epoch: int) -> Tensor:
        """Return the positions of any client's samples in the order of any epoch of this round, int64 ``(n,)``."""
        if self.seed is None or not self.shuffle:
            return torch.arange(num_samples)
        return seeding.permutation(num_samples, self.seed, "shuffle", self.round, client, epoch)

    def generator(self, purpose: str, step: int = -1) -> torch.Generator:
        """Return a generator for other draws of this epoch, or of one of its steps, e.g. ``"augment"``."""
        return seeding.generator(self.seed or 0, purpose, self.round, self.client, self.epoch, step)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def __len__(self) -> int:
        return self.num_samples


class ClientLoader:
    """Iterates over the batches of one data set; each is a list ``[inputs, targets]``, as from ``default_collate``.

    An :class:`~fedbc_lightning.data.datasets.ArrayDataset` is batched in memory, without a DataLoader and without a
    Python object per sample. Everything else is batched by torch's DataLoader, with the same batches in the same order.
    A ``lightning.Trainer`` can use this loader as it is, and shuffles in each epoch through :attr:`sampler`.

    Args:
        dataset: Map-style data set.
        batch_size: Number of samples per batch; the last batch of an epoch holds the rest.
        sampler: Order of the samples; if it has a seed, the loader is one for training, and inputs are augmented.
        drop_last: Whether to leave out a last batch that is not full.
        device: Device of in-memory batches; None is where the tensors lie. Batches that a DataLoader makes of a user's
            own data set stay on the CPU.
        options: Further arguments of the DataLoader; with ``collate_fn`` all batches come from a DataLoader.

    Attributes:
        dataset: The data set.
        batch_size: Number of samples per batch.
        sampler: Order of the samples; by default the order of the data set.
    """

    batch_sampler = None  # lightning.Trainer reads this attribute of a loader

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
        """Number of samples of the data set, those of a dropped last batch included."""
        return self.sampler.num_samples

    @cached_property
    def gathers(self) -> bool:
        """Whether batches are gathered from tensors in memory."""
        # A collate_fn takes a list of samples, which the gathered rows are not.
        return is_gathered(type(self.dataset)) and "collate_fn" not in self._options

    @property
    def gathers_plainly(self) -> bool:
        """Whether batches are gathered from tensors in memory and neither augmented nor transformed."""
        dataset = self.dataset
        return self.gathers and dataset.transform is None and dataset.augment is None  # type: ignore[attr-defined]

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return num_batches(self.sampler.num_samples, self.batch_size, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, whose batches the next iteration returns."""
        self.sampler.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if self.gathers:
            return chain.from_iterable(self.stretches())
        return iter(self._dataloader(self.dataset))

    def numbered(self) -> Iterator[tuple[Any, int, int | None]]:
        """Yield each batch with its number within its loader, and the number of the loader if steps are told it."""
        return zip(self, count(), repeat(None))

    def stretches(self) -> Iterator[Sequence[Any]]:
        """Return the batches in lists; those of one list have one form, and no code of the user's makes them."""
        if isinstance(self.dataset, ArrayDataset) and self.gathers:
            return self._gathered(self.dataset)
        return ([batch] for batch in self)

    def _gathered(self, dataset: ArrayDataset) -> Iterator[list[list[Tensor]]]:
        tensors = dataset.pool.on(self.device)
        device = None if self.device == tensors[0].device else self.device
        is_plain = device is None and self.gathers_plainly
        is_augmented = dataset.augment is not None and self.sampler.seed is not None
        rows = upload(dataset.rows(self.sampler.order()), tensors[0].device)
        if self.drop_last:
            rows = rows[: len(self) * self.batch_size]
        step = 0
        # One operation gathers several small batches, as many as fit into the cache, and they are cut apart below.
        at_once = BYTES_AT_ONCE if tensors[0].is_cpu else BYTES_ON_GPU
        size = max(1, at_once // (dataset.pool.sample_bytes * self.batch_size)) * self.batch_size
        for chunk in _cut(rows, size):
            columns = [_cut(tensor.index_select(0, chunk), self.batch_size) for tensor in tensors]
            batches = list(map(list, zip(*columns, strict=True)))
            if is_plain:
                num_full = len(chunk) // self.batch_size
                yield from filter(None, (batches[:num_full], batches[num_full:]))
                continue
            for batch in batches:
                generator = self.sampler.generator("augment", step) if is_augmented else None
                yield [dataset.finish(batch, generator, device)]
                step += 1

    def _dataloader(self, dataset: Dataset) -> DataLoader:
        loader = DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=self.sampler,
            drop_last=self.drop_last,
            # torch draws the base seed of the workers even if there are none; by default from the global generator, on
            # which dropout depends.
            generator=self.sampler.generator("workers"),
            **{"collate_fn": stack, **self._options},
        )
        check_workers(loader)
        return loader


def _cut(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Return ``tensor.split(size)``, without that call if there is one part: it costs as much as gathering a batch."""
    return (tensor,) if tensor.size(0) <= size else tensor.split(size)


def check_workers(loader: Any) -> None:
    """Raise if a loader's worker processes would run the user's script again, for lack of a guard."""
    if num_workers := getattr(loader, "num_workers", 0):
        context: Any = loader.multiprocessing_context or multiprocessing
        check_main_guard(f"data: a DataLoader with num_workers={num_workers}", context.get_start_method())


def stack(samples: list[Any]) -> Any:
    """Make a batch of samples as torch does.

    Raises:
        ConfigurationError: They cannot be stacked.
    """
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"data: samples cannot be stacked into a batch ({first_line(error)}); give data.collate_fn, which makes a "
            "batch of a list of samples"
        ) from error


def num_batches(num_samples: Number, batch_size: int, drop_last: bool = False) -> Number:
    """Return the number of batches in an epoch of ``num_samples`` samples, or of each client of an array of numbers.

    Example:
        >>> num_batches(10, 4), num_batches(10, 4, drop_last=True)
        (3, 2)
    """
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


class ClientLoaders(Sequence[ClientLoader]):
    """The loaders of K clients' batches in one round or evaluation, each made when it is asked for.

    To make a loader costs as much as the arithmetic of a small client's step. Batches that are gathered from tensors in
    memory need the first loader alone: the others differ from it in their data sets and clients.

    Args:
        datasets: The data of each client.
        clients: The numbers of the clients.
        make: Makes the loader of a client from its data and its number.

    Attributes:
        datasets: The argument of this name.
        sizes: Number of samples of each client, int64 (K,).
        num_batches: Number of batches per epoch of each client, int64 (K,).
        gathers: Whether the batches of all clients are gathered from tensors in memory.
    """

    def __init__(
        self, datasets: Sequence[Dataset], clients: Sequence[int], make: Callable[[Dataset, int], ClientLoader]
    ) -> None:
        self.datasets, self._clients, self._make = datasets, clients, make
        self.sizes = np.array(list(map(num_items, datasets)))
        self._first = first = make(datasets[0], clients[0])
        self.num_batches: np.ndarray = num_batches(self.sizes, first.batch_size, first.drop_last)
        # Thousands of clients have few classes of data sets, so each class is asked once.
        self.gathers = first.gathers and all(map(is_gathered, set(map(type, datasets))))

    def __len__(self) -> int:
        return len(self.datasets)

    def __getitem__(self, index: Any) -> Any:
        """Return the loader of the client at a place; the first one is always the same object."""
        return self._first if index == 0 else self._make(self.datasets[index], self._clients[index])

    def orders(self, num_epochs: int, num_kept: np.ndarray) -> Tensor:
        """Return the positions of each client's samples in the order of each epoch, client after client, in one vector.

        Args:
            num_epochs: Number of epochs.
            num_kept: Number of positions of each client that are wanted of each epoch, int64 (K,).
        """
        order, epochs = self._first.sampler.order_of, range(num_epochs)
        clients = zip(self.sizes.tolist(), self._clients, strict=True)
        orders = [order(size, client, epoch) for size, client in clients for epoch in epochs]
        if (num_kept < self.sizes).any():
            lengths = np.repeat(num_kept, num_epochs).tolist()
            orders = [order[:length] for order, length in zip(orders, lengths, strict=True)]
        return torch.cat(orders)


class OwnLoaders(ClientLoaders):
    """The loaders that a user's own method made; each may be of another kind, so their batches are made one by one.

    Args:
        loaders: The loader of each client.
    """

    def __init__(self, loaders: Sequence[ClientLoader]) -> None:
        self._loaders, self.gathers = loaders, False
        self.datasets = [loader.dataset for loader in loaders]
        self.sizes = np.array([loader.num_samples for loader in loaders])
        self.num_batches = np.array(list(map(len, loaders)))

    def __getitem__(self, index: Any) -> Any:
        """Return the loader of the client at a place."""
        return self._loaders[index]
