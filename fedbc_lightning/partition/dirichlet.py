"""Partition whose classes are shared among the clients by draws from a Dirichlet distribution."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedbc_lightning.core.checks import FINITE, above, at_least, check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import NumClients, Partition, Partitioner, check_enough_samples
from fedbc_lightning.partition.dealing import shuffled_by_class

Concentration = Annotated[float, above(0), FINITE]

MAX_DRAWS = 1000  # until every client has min_samples
MAX_SHARES_DRAWN = 10**8  # clients x classes x draws


class Dirichlet(Partitioner):
    """Splits each class by shares of the clients drawn from Dir(alpha) (Yurochkin et al. 2019; NIID-Bench).

    With a small alpha, clients have unequal sizes and few classes; with a large one, the split is close to IID. Shares
    are drawn again until every client has ``min_samples``, at most 1000 times (less often if N x classes is above
    100,000, but at least 10 times). Each client's samples are ordered by class.

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

    def __init__(
        self, num_clients: NumClients, alpha: Concentration = 0.5, min_samples: Annotated[int, at_least(1)] = 10
    ) -> None:
        check_arguments(Dirichlet, locals(), "data.partitioner")
        self.num_clients, self.alpha, self.min_samples = num_clients, alpha, min_samples

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split each class by its own draw of shares, again until every client has ``min_samples``.

        Raises:
            ConfigurationError: ``min_samples`` is impossible, or no draw reached it.
        """
        check_enough_samples(len(values), self.num_clients, self.min_samples)
        rng = np.random.default_rng(seed)
        by_class, class_sizes = shuffled_by_class(values, rng)
        draws = min(MAX_DRAWS, max(10, MAX_SHARES_DRAWN // (self.num_clients * len(class_sizes))))
        smallest = 0
        for _ in range(draws):
            owners, sizes = self._draw_owners(class_sizes, rng)
            smallest = max(smallest, int(sizes.min()))
            if smallest >= self.min_samples:
                return Partition.from_owners(owners, self.num_clients, by_class)
        raise ConfigurationError(
            f"data.partitioner.min_samples={self.min_samples}: not reached by every client in {draws} draws with alpha="
            f"{self.alpha} and num_clients={self.num_clients} (the best draw left a client with {smallest}); raise "
            "alpha, or lower min_samples or num_clients"
        )

    def _draw_owners(self, class_sizes: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the client of each sample, class by class, ``(M,)``, and the number of samples of each, ``(N,)``."""
        # One class at a time: the table of all shares, (classes, N), is too large for many clients
        clients, concentration = np.arange(self.num_clients), np.full(self.num_clients, self.alpha)
        sizes = np.zeros(self.num_clients, dtype=np.int64)
        owners = []
        for total in class_sizes:
            cuts = np.rint(np.cumsum(rng.dirichlet(concentration)) * total).astype(np.int64)
            cuts[-1] = total  # rounding errors of the sum of shares may leave a sample over
            counts = np.diff(cuts, prepend=0)
            sizes += counts
            owners.append(np.repeat(clients, counts))
        return np.concatenate(owners), sizes
