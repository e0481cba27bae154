"""Every class shared out over the clients by a draw from a Dirichlet distribution."""

from __future__ import annotations

import math

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner
from fedbc_lightning.partition.dealing import check_enough_samples, check_min_samples, shuffled_by_class, whole

MAX_DRAWS = 1000
MAX_SHARES_DRAWN = 10**8
"""Clients x classes x draws: a few seconds."""


class Dirichlet(Partitioner):
    """Each class is shared out over the clients by shares drawn from Dir(alpha) (Yurochkin et al. 2019; NIID-Bench).

    A small alpha makes sizes unequal and classes per client few; a large one nears IID. Shares are drawn again until
    every client has ``min_samples``, at most 1000 times (fewer where N x classes is above 100,000, but at least 10).

    Args:
        num_clients: Number of clients N, at least 1.
        alpha: Concentration of the shares, above 0, one for all clients.
        min_samples: Every client gets at least so many samples, at least 1.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> sum(len(indices) for indices in Dirichlet(5, alpha=0.5)(np.arange(1000) % 10, seed=0))
        1000
    """

    num_clients: int

    def __init__(self, num_clients: int, alpha: float = 0.5, min_samples: int = 10) -> None:
        self.num_clients = whole("num_clients", num_clients, 1)
        self.min_samples = whole("min_samples", min_samples, 1)
        self.alpha = check_alpha(alpha)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """See :func:`split_dirichlet`."""
        rng = np.random.default_rng(seed)
        return split_dirichlet(values, self.num_clients, self.alpha, self.min_samples, rng)


def split_dirichlet(
    labels: np.ndarray, num_clients: int, alpha: float, min_samples: int, rng: np.random.Generator
) -> Partition:
    """Share out every class by its own draw from Dir(alpha) over the clients, until all have ``min_samples``.

    Args:
        labels: Class of each sample, integers ``(M,)``.
        num_clients: N.
        alpha: Concentration, above 0.
        min_samples: Smallest client allowed.
        rng: Shares and order of samples.

    Returns:
        The clients' samples, class by class.

    Raises:
        ConfigurationError: ``min_samples`` is impossible, or was not met in any draw.
    """
    check_enough_samples(len(labels), num_clients)
    check_min_samples(len(labels), num_clients, min_samples)
    by_class, class_sizes = shuffled_by_class(labels, rng)
    clients, concentration = np.arange(num_clients), np.full(num_clients, alpha)
    draws = min(MAX_DRAWS, max(10, MAX_SHARES_DRAWN // (num_clients * len(class_sizes))))
    smallest = 0
    for _ in range(draws):
        sizes = np.zeros(num_clients, dtype=np.int64)
        owners = np.empty(len(labels), dtype=np.int64)
        end = 0
        for total in class_sizes:
            cuts = np.rint(np.cumsum(rng.dirichlet(concentration)) * total).astype(np.int64)
            cuts[-1] = total
            counts = np.diff(cuts, prepend=0)
            sizes += counts
            start, end = end, end + total
            owners[start:end] = np.repeat(clients, counts)
        fewest = int(sizes.min())
        if fewest >= min_samples:
            return Partition.from_owners(owners, num_clients, by_class)
        smallest = max(smallest, fewest)
    raise ConfigurationError(
        f"min_samples={min_samples}: not reached by every client in {draws} draws with alpha={alpha} and "
        f"num_clients={num_clients} (the best draw left a client with {smallest}); raise alpha, or lower "
        "min_samples or num_clients"
    )


def check_alpha(alpha: float) -> float:
    """The concentration, above 0 and finite.

    Raises:
        ConfigurationError: It is not.
    """
    if not 0 < alpha < math.inf:
        raise ConfigurationError(f"alpha={alpha}: the Dirichlet concentration must be above 0; give e.g. 0.5")
    return alpha
