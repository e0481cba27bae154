"""Partition whose classes are shared among the clients by draws from a Dirichlet distribution."""

from __future__ import annotations

import math

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner
from fedbc_lightning.partition.dealing import check_enough_samples, check_min_samples, shuffled_by_class, whole

MAX_DRAWS = 1000
"""Largest number of draws until every client has ``min_samples``."""

MAX_SHARES_DRAWN = 10**8
"""Largest product of clients, classes and draws, which takes a few seconds."""


class Dirichlet(Partitioner):
    """Splits each class by shares of the clients drawn from Dir(alpha) (Yurochkin et al. 2019; NIID-Bench).

    With a small alpha, clients have unequal sizes and few classes; with a large one, the split is close to IID. Shares
    are drawn again until every client has ``min_samples``, at most 1000 times (less often if N x classes is above
    100,000, but at least 10 times).

    Args:
        num_clients: Number of clients N, at least 1.
        alpha: Concentration of the Dirichlet distribution, above 0, the same for all clients.
        min_samples: Smallest number of samples that a client may get, at least 1.

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
        """Split the samples with :func:`split_dirichlet`."""
        rng = np.random.default_rng(seed)
        return split_dirichlet(values, self.num_clients, self.alpha, self.min_samples, rng)


def split_dirichlet(
    labels: np.ndarray, num_clients: int, alpha: float, min_samples: int, rng: np.random.Generator
) -> Partition:
    """Split each class by its own draw of shares from Dir(alpha), again until every client has ``min_samples``.

    Args:
        labels: Class of each sample, integers ``(M,)``.
        num_clients: Number of clients N.
        alpha: Concentration of the Dirichlet distribution, above 0.
        min_samples: Smallest number of samples that a client may get.
        rng: Generator of the shares and of the order of samples.

    Returns:
        The partition, with each client's samples ordered by class.

    Raises:
        ConfigurationError: ``min_samples`` is impossible, or no draw reached it.
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
    """Return the concentration ``alpha`` after checking that it is above 0 and finite.

    Raises:
        ConfigurationError: ``alpha`` is not above 0, or not finite.
    """
    if not 0 < alpha < math.inf:
        raise ConfigurationError(f"alpha={alpha}: the Dirichlet concentration must be above 0; give e.g. 0.5")
    return alpha
