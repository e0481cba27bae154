"""The loaders of many clients at once, and what is the same of all of them, without a Python object per client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedbc_lightning.data.datasets import ArrayDataset, num_items
from fedbc_lightning.data.loading import ClientLoader, num_batches


class ClientLoaders(Sequence[ClientLoader]):
    """The loaders of K clients' batches, each of which may be of another kind.

    Args:
        loaders: The loader of each client.

    Attributes:
        datasets: The data set of each client.
        sizes: Number of samples of each client, int64 (K,).
    """

    def __init__(self, loaders: Sequence[ClientLoader]) -> None:
        self._loaders = list(loaders)
        self.datasets: Sequence[Dataset] = [loader.dataset for loader in loaders]
        self.sizes = np.array([loader.num_samples for loader in loaders])

    def __len__(self) -> int:
        return len(self.datasets)

    def __getitem__(self, index: Any) -> Any:
        """Return the loader of the client at a place."""
        return self._loaders[index]

    @property
    def num_batches(self) -> np.ndarray:
        """Number of batches per epoch of each client, int64 (K,)."""
        return np.array(list(map(len, self)))

    @property
    def gathers(self) -> bool:
        """Whether all loaders gather batches of one size from tensors in memory."""
        return all(loader.gathers and loader.batch_size == self[0].batch_size for loader in self)

    def orders(self, num_epochs: int, num_kept: np.ndarray) -> Tensor:
        """Return the positions of each client's samples in the order of each epoch, client after client, in one vector.

        Args:
            num_epochs: Number of epochs.
            num_kept: Number of positions of each client that are wanted of each epoch, int64 (K,).
        """
        orders = self._orders(num_epochs)
        if (num_kept < self.sizes).any():
            lengths = np.repeat(num_kept, num_epochs).tolist()
            orders = [order[:length] for order, length in zip(orders, lengths, strict=True)]
        return torch.cat(orders)

    def _orders(self, num_epochs: int) -> list[Tensor]:
        orders = []
        for loader in self:
            for epoch in range(num_epochs):
                loader.set_epoch(epoch)
                orders.append(loader.sampler.order())
        return orders


class LoadersOnDemand(ClientLoaders):
    """The loaders of K clients' training batches in one round, each made when it is asked for.

    To make a loader costs as much as the arithmetic of a small client's step. Batches that are gathered from tensors in
    memory need the first loader alone: the others differ from it in their data sets and clients.

    Args:
        datasets: The training data of each client.
        clients: The numbers of the clients.
        make: Makes the loader of a client from its data and its number.
    """

    def __init__(
        self, datasets: Sequence[Dataset], clients: Sequence[int], make: Callable[[Dataset, int], ClientLoader]
    ) -> None:
        self.datasets, self._clients, self._make = datasets, clients, make
        self.sizes = np.array(list(map(num_items, datasets)))
        self._first = make(datasets[0], clients[0])

    def __getitem__(self, index: Any) -> Any:
        """Return the loader of the client at a place; the first one is always the same object."""
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        return self._first if index == 0 else self._make(self.datasets[index], self._clients[index])

    @property
    def num_batches(self) -> np.ndarray:
        """Number of batches per epoch of each client, int64 (K,)."""
        return num_batches(self.sizes, self._first.batch_size, self._first.drop_last)

    @property
    def gathers(self) -> bool:
        """Whether the batches of all clients are gathered from tensors in memory."""
        # Thousands of clients have few classes of data sets, so issubclass is asked once for each class.
        return self._first.gathers and all(issubclass(kind, ArrayDataset) for kind in set(map(type, self.datasets)))

    def _orders(self, num_epochs: int) -> list[Tensor]:
        order, epochs = self._first.sampler.order_of, range(num_epochs)
        sizes = self.sizes.tolist()
        return [order(size, k, epoch) for size, k in zip(sizes, self._clients, strict=True) for epoch in epochs]
