"""Partitions whose clients draw from all samples alike: equal sizes, and three kinds of unequal sizes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedbc_lightning.core.checks import FINITE, Count, at_least, checked, within
from fedbc_lightning.partition.base import Partition, Partitioner, check_enough_samples
from fedbc_lightning.partition.dealing import apportion

# Of the sigma of log-normal sizes. With 10 the largest of 100 clients already holds 89 % of the samples (the median of
# 2,000 draws); from 710 on exp(sigma) exceeds the largest float64.
SPREAD = within(0, 10)


class SizesPartitioner(Partitioner):
    """Base class of partitioners that shuffle all samples and cut them into parts of some sizes."""

    num_clients: int
    needs_labels: ClassVar[bool] = False

    @abstractmethod
    def draw_sizes(self, num_samples: int, rng: np.random.Generator) -> np.ndarray:
        """Return the size of each client, int64 ``(N,)`` with sum ``num_samples``."""

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Cut a random permutation of the samples into parts of the sizes.

        Raises:
            ConfigurationError: There are more clients than samples.
        """
        rng = np.random.default_rng(seed)
        check_enough_samples(len(values), self.num_clients)
        sizes = self.draw_sizes(len(values), rng)
        return Partition.from_sizes(rng.permutation(len(values)), sizes)


@checked("data.partitioner")
@dataclass(eq=False)
class IID(SizesPartitioner):
    """Shuffles the samples and cuts them into equal parts (sizes differ by at most one).

    Args:
        num_clients: Number of clients N, at least 1.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> [len(indices) for indices in IID(3)(np.zeros(10, int), seed=0)]
        [4, 3, 3]
    """

    num_clients: Count

    def draw_sizes(self, num_samples: int, rng: np.random.Generator) -> np.ndarray:
        """Return equal sizes; nothing is drawn."""
        return equal_sizes(num_samples, self.num_clients)


@checked("data.partitioner")
@dataclass(eq=False)
class LogNormalSizes(SizesPartitioner):
    """Gives client k a size in proportion to exp(sigma * z_k), z_k ~ N(0, 1), with samples drawn from the whole data.

    Args:
        num_clients: Number of clients N, at least 1.
        sigma: Spread of the sizes, in [0, 10]. With 0 they are equal; with 2 the largest of 100 clients has about 130
            times as many samples as the median one.
        min_samples: Smallest number of samples that a client may get, at least 1.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> [len(indices) for indices in LogNormalSizes(5, sigma=1.0)(np.zeros(1000, int), seed=0)]
        [202, 156, 339, 198, 105]
    """

    num_clients: Count
    sigma: Annotated[float, SPREAD] = 1.0
    min_samples: Count = 1

    def draw_sizes(self, num_samples: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the sizes.

        Raises:
            ConfigurationError: There are not enough samples for ``min_samples`` per client.
        """
        check_enough_samples(num_samples, self.num_clients, self.min_samples)
        return apportion(num_samples, rng.lognormal(0.0, self.sigma, self.num_clients), self.min_samples)


@checked("data.partitioner")
@dataclass(eq=False)
class LinearSizes(SizesPartitioner):
    """Gives clients sizes in proportion to k = 1..N, at least 1, with samples drawn from the whole data.

    Args:
        num_clients: Number of clients N, at least 1; client 0 is the smallest.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> [len(indices) for indices in LinearSizes(4)(np.zeros(100, int), seed=0)]
        [10, 20, 30, 40]
    """

    num_clients: Count

    def draw_sizes(self, num_samples: int, rng: np.random.Generator) -> np.ndarray:
        """Return sizes in proportion to k = 1..N; nothing is drawn."""
        return apportion(num_samples, np.arange(1.0, self.num_clients + 1))


@checked("data.partitioner")
@dataclass(eq=False)
class ExponentialSizes(SizesPartitioner):
    """Gives clients sizes in proportion to base^k, k = 1..N, at least 1, with samples drawn from the whole data.

    :class:`PowerLaw` has such sizes, too, with few classes per client.

    Args:
        num_clients: Number of clients N, at least 1; client 0 is the smallest.
        base: Size of a client relative to the one before, at least 1.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> [len(indices) for indices in ExponentialSizes(4, base=2.0)(np.zeros(150, int), seed=0)]
        [10, 20, 40, 80]
    """

    num_clients: Count
    base: Annotated[float, at_least(1), FINITE] = 1.2

    def draw_sizes(self, num_samples: int, rng: np.random.Generator) -> np.ndarray:
        """Return sizes in proportion to base^k; nothing is drawn."""
        # Divided by the largest, base^N, which float64 could not hold for many clients
        return apportion(num_samples, np.float64(self.base) ** np.arange(1.0 - self.num_clients, 1.0))


def equal_sizes(num_samples: int, num_clients: int) -> np.ndarray:
    """Return N sizes with sum ``num_samples`` that differ by at most one, the larger first, int64 ``(N,)``."""
    least, more = divmod(num_samples, num_clients)
    return np.where(np.arange(num_clients) < more, least + 1, least).astype(np.int64)
