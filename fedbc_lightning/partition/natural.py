"""Partition by the clients that the data name themselves: a role of a play, a writer, an account."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np

from fedbc_lightning.core.checks import at_least, check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import NumClients, Partition, Partitioner


class Natural(Partitioner):
    """Keeps the natural clients of the data, or some of them.

    Clients stay in the order of their natural numbers 0..K-1, and each client's samples in the order of the data. The
    samples of clients that are left out are not used.

    Args:
        num_clients: Number of clients, drawn at random from those with at least ``min_samples``; None keeps all these.
        min_samples: Smallest number of samples of a client that is kept, at least 1.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> clients = np.array([0, 1, 0, 2, 2, 2])
        >>> [indices.tolist() for indices in Natural(min_samples=2)(clients, seed=0)]
        [[0, 2], [3, 4, 5]]
    """

    needs_labels: ClassVar[bool] = False
    needs_clients: ClassVar[bool] = True
    complete: ClassVar[bool] = False

    def __init__(self, num_clients: NumClients | None = None, min_samples: Annotated[int, at_least(1)] = 1) -> None:
        check_arguments(Natural, locals(), "data.partitioner")
        self.num_clients, self.min_samples = num_clients, min_samples

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Keep the clients with at least ``min_samples`` samples, or ``num_clients`` of these.

        Args:
            values: Natural client of each sample, integers from 0, ``(M,)``.
            seed: Seed of the draw of clients.

        Raises:
            ConfigurationError: Fewer clients have ``min_samples`` than are asked for.
        """
        sizes = np.bincount(values)
        kept = np.flatnonzero(sizes >= self.min_samples)
        if len(kept) < (self.num_clients or 1):
            raise ConfigurationError(
                f"data.partitioner.num_clients={self.num_clients}: of the data's {np.count_nonzero(sizes)} natural "
                f"clients {len(kept)} have min_samples={self.min_samples} samples; lower one of the two"
            )
        if self.num_clients is not None:
            # Ascending, so that clients keep the order of the data whatever was drawn
            kept = np.sort(np.random.default_rng(seed).choice(kept, self.num_clients, replace=False))
        new_number = np.full(len(sizes), -1)
        new_number[kept] = np.arange(len(kept))
        return Partition.from_owners(new_number[values], len(kept))
