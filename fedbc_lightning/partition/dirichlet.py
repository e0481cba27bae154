"""Partitions by draws from a Dirichlet distribution: over the clients of each class, or over each client's classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedbc_lightning.core.checks import Count, FinitePositive, checked
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner, check_enough_samples
from fedbc_lightning.partition.dealing import apportion, shuffled_by_class
from fedbc_lightning.partition.sizes import SPREAD, equal_sizes

MAX_DRAWS = 1000  # until every client has min_samples
MAX_SHARES_DRAWN = 10**8  # clients x classes x draws


@checked("data.partitioner")
@dataclass(eq=False)
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

    num_clients: Count
    alpha: FinitePositive = 0.5
    min_samples: Count = 10

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


SHARES_PER_BLOCK = 2**17  # shares that are drawn at once, 1 MiB of float64


@checked("data.partitioner")
@dataclass(eq=False)
class InnerDirichlet(Partitioner):
    """Gives each client exactly the size asked for, with class shares of its own drawn from Dir(alpha).

    All samples are used. If a class has run out, a client takes other classes in proportion to its shares of these;
    with a small alpha it therefore ends with more classes than its shares favour.

    Args:
        num_clients: Number of clients N, at least 1.
        alpha: Concentration of the Dirichlet distribution over classes, above 0, the same for all classes.
        sizes: Number of samples of each client, N numbers of 1 or more that sum to M; None gives equal sizes, up to
            one sample, or those of ``size_spread``.
        size_spread: Spread of the sizes if ``sizes`` is None, in [0, 10]; above 0 the sizes are in proportion to
            exp(size_spread * z), z ~ N(0, 1).

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> labels = np.arange(100) % 10
        >>> [len(indices) for indices in InnerDirichlet(3, alpha=0.3, sizes=[20, 30, 50])(labels, seed=0)]
        [20, 30, 50]
    """

    num_clients: Count
    alpha: FinitePositive = 0.5
    sizes: Sequence[int] | None = None
    size_spread: Annotated[float, SPREAD] = 0.0

    def __post_init__(self) -> None:
        """Check the sizes among each other."""
        sizes = self.sizes
        if sizes is not None and (len(sizes) != self.num_clients or min(sizes) < 1 or self.size_spread):
            raise ConfigurationError(
                f"data.partitioner.sizes: got {list(sizes)}; give num_clients={self.num_clients} whole numbers >= 1, "
                "and no size_spread"
            )

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Fill clients of the given sizes according to class shares that are drawn for each client.

        In each turn, every free place of a client draws a class from the client's shares of the classes that have
        samples left. If a class is drawn more often than it has samples, random places get them, and the others draw
        again in the next turn. Each client's samples are ordered by class.

        Raises:
            ConfigurationError: The sizes do not sum to M.
        """
        rng = np.random.default_rng(seed)
        sizes = self._draw_sizes(len(values), rng)
        by_class, left = shuffled_by_class(values, rng)
        shares_seed = int(rng.integers(2**63))
        client_of_place = np.repeat(np.arange(len(sizes)), sizes)
        class_of_place = np.empty(len(values), dtype=np.int64)
        free = np.arange(len(values))
        while len(free):
            drawn = _draw_classes(client_of_place[free], len(sizes), left > 0, self.alpha, shares_seed, rng)
            order = rng.permutation(len(free))
            order = order[np.argsort(drawn[order], kind="stable")]
            asked = np.bincount(drawn, minlength=len(left))
            rank = np.arange(len(free)) - np.repeat(np.cumsum(asked) - asked, asked)
            served = np.zeros(len(free), dtype=bool)
            served[order] = rank < np.repeat(left, asked)
            class_of_place[free[served]] = drawn[served]
            left = left - np.minimum(asked, left)
            free = free[~served]
        return Partition.from_owners(client_of_place[np.argsort(class_of_place, kind="stable")], len(sizes), by_class)

    def _draw_sizes(self, num_samples: int, rng: np.random.Generator) -> np.ndarray:
        check_enough_samples(num_samples, self.num_clients)
        if self.sizes is not None and sum(self.sizes) != num_samples:
            found = f"they sum to {sum(self.sizes)}, the data has {num_samples} samples"
            raise ConfigurationError(f"data.partitioner.sizes: {found}")
        if self.sizes is not None:
            return np.array(self.sizes)
        if self.size_spread:
            return apportion(num_samples, rng.lognormal(0.0, self.size_spread, self.num_clients))
        return equal_sizes(num_samples, self.num_clients)


def _draw_classes(
    clients: np.ndarray, num_clients: int, available: np.ndarray, alpha: float, seed: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw a class for each free place.

    The shares of all clients, ``(N, num_classes)``, may not fit into memory: blocks of them are drawn again from the
    seed in each turn.

    Args:
        clients: Client of each place, ascending.
        num_clients: Number of clients N.
        available: Whether each class has samples left, bool ``(num_classes,)``.
        alpha: Concentration of the Dirichlet distribution.
        seed: Seed of the shares.
        rng: Generator of the draws from the shares.
    """
    num_classes = len(available)
    drawn = np.empty(len(clients), dtype=np.int64)
    block = max(1, SHARES_PER_BLOCK // num_classes)
    for first in range(0, num_clients, block):
        start, end = np.searchsorted(clients, [first, first + block])
        if start == end:
            continue
        number = min(block, num_clients - first)
        shares = np.random.default_rng([seed, first]).dirichlet(np.full(num_classes, alpha), number) * available
        shares[shares.sum(axis=1) == 0] = available  # every class of which this client has a share has run out
        bounds = np.cumsum(shares, axis=1)
        bounds = bounds / bounds[:, -1:] + np.arange(number)[:, None]
        rows = clients[start:end] - first
        # Below 1, since the last bound of a row is its number plus 1 only up to rounding
        below_one = rng.random(end - start) * (1 - 1e-9)
        drawn[start:end] = np.searchsorted(bounds.ravel(), rows + below_one, side="right") - rows * num_classes
    return drawn
