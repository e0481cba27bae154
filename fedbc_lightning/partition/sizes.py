"""Partitions whose clients draw from all samples alike: equal sizes, and three kinds of unequal sizes."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner
from fedbc_lightning.partition.dealing import (
    apportion,
    check_enough_samples,
    check_min_samples,
    check_spread,
    whole,
)


class IID(Partitioner):
    """Shuffles the samples and cuts them into equal parts (sizes differ by at most one).

    Args:
        num_clients: Number of clients N, at least 1.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> [len(indices) for indices in IID(3)(np.zeros(10, int), seed=0)]
        [4, 3, 3]
    """

    num_clients: int
    needs_labels: ClassVar[bool] = False

    def __init__(self, num_clients: int) -> None:
        self.num_clients = whole("num_clients", num_clients, 1)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples with :func:`split_iid`."""
        return split_iid(len(values), self.num_clients, np.random.default_rng(seed))


class LogNormalSizes(Partitioner):
    """Gives client k a size in proportion to exp(sigma * z_k), z_k ~ N(0, 1), with samples drawn from the whole data.

    Args:
        num_clients: Number of clients N, at least 1.
        sigma: Spread of the sizes, in [0, 10]. With 0 they are equal; with 2 the largest of 100 clients has about 150
            times as many samples as the median one.
        min_samples: Smallest number of samples that a client may get, at least 1.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> [len(indices) for indices in LogNormalSizes(5, sigma=1.0)(np.zeros(1000, int), seed=0)]
        [202, 156, 339, 198, 105]
    """

    num_clients: int
    needs_labels: ClassVar[bool] = False

    def __init__(self, num_clients: int, sigma: float = 1.0, min_samples: int = 1) -> None:
        self.num_clients = whole("num_clients", num_clients, 1)
        self.sigma = check_spread("sigma", sigma)
        self.min_samples = whole("min_samples", min_samples, 1)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples into parts of :func:`log_normal_sizes`."""
        rng = np.random.default_rng(seed)
        sizes = log_normal_sizes(len(values), self.num_clients, self.sigma, self.min_samples, rng)
        return split_by_sizes(sizes, rng)


class LinearSizes(Partitioner):
    """Gives clients sizes in proportion to k = 1..N, at least 1, with samples drawn from the whole data.

    Args:
        num_clients: Number of clients N, at least 1; client 0 is the smallest.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> [len(indices) for indices in LinearSizes(4)(np.zeros(100, int), seed=0)]
        [10, 20, 30, 40]
    """

    num_clients: int
    needs_labels: ClassVar[bool] = False

    def __init__(self, num_clients: int) -> None:
        self.num_clients = whole("num_clients", num_clients, 1)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples into parts of :func:`linear_sizes`."""
        return split_by_sizes(linear_sizes(len(values), self.num_clients), np.random.default_rng(seed))


class ExponentialSizes(Partitioner):
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

    num_clients: int
    needs_labels: ClassVar[bool] = False

    def __init__(self, num_clients: int, base: float = 1.2) -> None:
        self.num_clients = whole("num_clients", num_clients, 1)
        if not 1 <= base < math.inf:
            raise ConfigurationError(f"base={base}: each client is `base` times the one before; give 1 or more")
        self.base = base

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples into parts of :func:`exponential_sizes`."""
        sizes = exponential_sizes(len(values), self.num_clients, self.base)
        return split_by_sizes(sizes, np.random.default_rng(seed))


def split_iid(num_samples: int, num_clients: int, rng: np.random.Generator) -> Partition:
    """Cut a random permutation of the samples into ``num_clients`` parts whose sizes differ by at most one.

    Raises:
        ConfigurationError: There are more clients than samples.
    """
    return split_by_sizes(equal_sizes(num_samples, num_clients), rng)


def split_by_sizes(sizes: np.ndarray, rng: np.random.Generator) -> Partition:
    """Cut a random permutation of ``sum(sizes)`` samples into parts of these sizes."""
    return Partition.from_sizes(rng.permutation(sizes.sum()), sizes)


def equal_sizes(num_samples: int, num_clients: int) -> np.ndarray:
    """Return N sizes with sum ``num_samples`` that differ by at most one, the larger first, int64 ``(N,)``.

    Raises:
        ConfigurationError: There are more clients than samples.
    """
    check_enough_samples(num_samples, num_clients)
    least, more = divmod(num_samples, num_clients)
    return np.where(np.arange(num_clients) < more, least + 1, least).astype(np.int64)


def log_normal_sizes(
    num_samples: int, num_clients: int, sigma: float, min_samples: int, rng: np.random.Generator
) -> np.ndarray:
    """Return sizes in proportion to exp(sigma * z_k), z_k ~ N(0, 1), at least ``min_samples``.

    Args:
        num_samples: Sum of the sizes, M.
        num_clients: Number of sizes, N.
        sigma: Spread of the sizes, in [0, 10].
        min_samples: Smallest size allowed.
        rng: Generator of the z_k.

    Returns:
        The sizes, int64 ``(N,)``.

    Raises:
        ConfigurationError: There are not enough samples for ``min_samples`` per client.
    """
    check_enough_samples(num_samples, num_clients)
    check_min_samples(num_samples, num_clients, min_samples)
    return apportion(num_samples, rng.lognormal(0.0, sigma, num_clients), min_samples)


def linear_sizes(num_samples: int, num_clients: int) -> np.ndarray:
    """Return sizes in proportion to k = 1..N, at least 1, int64 ``(N,)`` with sum ``num_samples``.

    Raises:
        ConfigurationError: There are more clients than samples.
    """
    check_enough_samples(num_samples, num_clients)
    return apportion(num_samples, np.arange(1.0, num_clients + 1))


def exponential_sizes(num_samples: int, num_clients: int, base: float) -> np.ndarray:
    """Return sizes in proportion to base^k, k = 1..N, at least 1, int64 ``(N,)`` with sum ``num_samples``.

    Raises:
        ConfigurationError: There are more clients than samples.
    """
    check_enough_samples(num_samples, num_clients)
    return apportion(num_samples, np.float64(base) ** np.arange(1.0 - num_clients, 1.0))
