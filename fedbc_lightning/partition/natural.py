"""Partition by the clients that the data name themselves: a role of a play, a writer, an account."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner
from fedbc_lightning.partition.dealing import whole


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

    def __init__(self, num_clients: int | None = None, min_samples: int = 1) -> None:
        self.num_clients = None if num_clients is None else whole("num_clients", num_clients, 1)
        self.min_samples = whole("min_samples", min_samples, 1)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples with :func:`split_natural`."""
        return split_natural(values, self.num_clients, self.min_samples, np.random.default_rng(seed))


def split_natural(
    clients: np.ndarray, num_clients: int | None, min_samples: int, rng: np.random.Generator
) -> Partition:
    """Keep the natural clients with at least ``min_samples`` samples, or ``num_clients`` of these.

    Args:
        clients: Natural client of each sample, integers from 0, ``(M,)``.
        num_clients: Number of clients to draw; None keeps all.
        min_samples: Smallest number of samples of a client that is kept.
        rng: Generator of the draw of clients.

    Raises:
        ConfigurationError: Fewer clients have ``min_samples`` than are asked for.
    """
    sizes = np.bincount(clients)
    kept = np.flatnonzero(sizes >= min_samples)
    if not len(kept):
        raise ConfigurationError(
            f"min_samples={min_samples}: none of the data's {np.count_nonzero(sizes)} natural clients has so many "
            f"samples; give at most {sizes.max(initial=0)}"
        )
    if num_clients is not None and num_clients > len(kept):
        raise ConfigurationError(
            f"num_clients={num_clients}: of the data's {np.count_nonzero(sizes)} natural clients {len(kept)} have "
            f"min_samples={min_samples} samples; give at most {len(kept)}, or lower min_samples"
        )
    if num_clients is not None:
        kept = np.sort(rng.choice(kept, num_clients, replace=False))
    new_number = np.full(len(sizes), -1)
    new_number[kept] = np.arange(len(kept))
    return Partition.from_owners(new_number[clients], len(kept))
