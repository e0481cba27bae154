"""Partitions with few classes per client and equal sizes: exactly C classes, or shards of the sorted samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedbc_lightning.core.checks import Count, checked
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner, check_enough_samples
from fedbc_lightning.partition.dealing import apportion, check_num_classes, shuffled_by_class
from fedbc_lightning.partition.sizes import SPREAD, equal_sizes

# From 3 swaps of each place on, it no longer changes how unevenly two classes meet at a client: for 10 classes and 100
# clients the standard deviation over the pairs of classes stays at 1.3 for C = 2 and at 2.5 for C = 5, and is 6.3 and
# 24.8 without a swap (means of 40 draws).
SWAPS_PER_CLASS = 10


@checked("data.partitioner")
@dataclass(eq=False)
class ClassesPerClient(Partitioner):
    """Gives every client samples of exactly C classes.

    The number of clients that hold a class, from 1 to N, is in proportion to its number of samples. The samples of a
    class are shared equally among its holders, or unequally with ``size_spread``. Fed+ uses ``(200, 5)`` on FEMNIST,
    and on MNIST 1,000 clients of one digit each with "power-law" sizes; in FedProx's public code these are log-normal:
    ``(1000, 1, size_spread=2.0)``.

    Args:
        num_clients: Number of clients N; N * C must be at least the number of classes.
        classes_per_client: Number of classes per client C, from 1 to the number of classes.
        size_spread: Spread of the parts of a class, in [0, 10]. With 0 its holders get equal parts, up to one sample.
            Above 0 the parts are in proportion to exp(size_spread * z), with z ~ N(0, 1) for each holder of each class,
            and at least one sample.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> labels = np.arange(100) % 10
        >>> [len(np.unique(labels[indices])) for indices in ClassesPerClient(4, 3)(labels, seed=0)]
        [3, 3, 3, 3]
    """

    num_clients: Count
    classes_per_client: Count = 2
    size_spread: Annotated[float, SPREAD] = 0.0

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Choose the clients that hold each class, then share the samples of each class among its holders.

        Raises:
            ConfigurationError: Clients cannot all have C classes, or a class would have no holder.
        """
        rng = np.random.default_rng(seed)
        check_enough_samples(len(values), self.num_clients)
        by_class, class_sizes = shuffled_by_class(values, rng)
        num_holders = count_holders(class_sizes, self.num_clients, self.classes_per_client)
        held = _draw_held(num_holders, self.num_clients, self.classes_per_client, rng).ravel()
        # The class is the whole part, and the random fraction shuffles its places.
        holders = np.argsort(held + rng.random(len(held))) // self.classes_per_client
        spread = self.size_spread
        parts = [
            apportion(size, rng.lognormal(0.0, spread, number)) if spread else equal_sizes(size, number)
            for size, number in zip(class_sizes, num_holders, strict=True)
        ]
        return Partition.from_owners(np.repeat(holders, np.concatenate(parts)), self.num_clients, by_class)


def count_holders(class_sizes: np.ndarray, num_clients: int, classes_per_client: int) -> np.ndarray:
    """Return how many clients hold each class, int64 ``(num_classes,)``.

    The numbers sum to N * C and are in proportion to the sizes of the classes, rounded by largest remainders. Each is
    at least 1, at most N, and at most the number of samples of the class.

    Args:
        class_sizes: Number of samples of each class, ``(num_classes,)``.
        num_clients: Number of clients N.
        classes_per_client: Number of classes per client C.

    Raises:
        ConfigurationError: N * C is too small or too large for these bounds.

    Example:
        >>> count_holders(np.array([500, 300, 200]), num_clients=10, classes_per_client=1).tolist()
        [5, 3, 2]
    """
    num_classes, places = len(class_sizes), num_clients * classes_per_client
    check_num_classes(classes_per_client, num_classes)
    most = np.minimum(class_sizes, num_clients)
    if not num_classes <= places <= most.sum():
        raise ConfigurationError(
            f"data.partitioner.classes_per_client={classes_per_client}: num_clients={num_clients} clients hold "
            f"{places} (client, class) pairs, the data's {num_classes} classes and their sizes allow {num_classes} to "
            f"{most.sum()}; give {-(-num_classes // num_clients)} to {most.sum() // num_clients}"
        )
    return apportion(places, class_sizes, 1, most)


def _draw_held(
    num_holders: np.ndarray, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw which classes each client holds, ``(N, C)``, C different ones each.

    The places of one class after the other are dealt out to the clients in turn. This never gives a client the same
    class twice, because a class has at most N places. Then random pairs of clients swap one class each, unless one of
    them already has the class that it would get.
    """
    classes = rng.permutation(len(num_holders))
    held = np.repeat(classes, num_holders[classes]).reshape(classes_per_client, num_clients).T
    held = held[rng.permutation(num_clients)]
    for _ in range(SWAPS_PER_CLASS * classes_per_client if classes_per_client > 1 else 0):
        pairs = rng.permutation(num_clients)[: num_clients // 2 * 2].reshape(2, -1)
        places = rng.integers(classes_per_client, size=pairs.shape)
        given, taken = held[pairs, places]
        fits = (held[pairs[1]] != given[:, None]).all(axis=1) & (held[pairs[0]] != taken[:, None]).all(axis=1)
        held[pairs[0, fits], places[0, fits]] = taken[fits]
        held[pairs[1, fits], places[1, fits]] = given[fits]
    return held


@checked("data.partitioner")
@dataclass(eq=False)
class Shards(Partitioner):
    """Sorts samples by class, cuts them into N * k equal shards, and gives each client k (McMahan et al. 2017).

    Which shards a client gets is random. With 2 shards most clients have samples of 2 classes.
    ``shards_per_client=1`` is L2GD's heterogeneous split (sorted by label, then cut). Sizes of shards differ by at most
    one. Each client's indices are ordered by shard.

    Args:
        num_clients: Number of clients N, at least 1.
        shards_per_client: Number of shards per client k, at least 1.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> labels = np.repeat([0, 1, 2, 3], 5)
        >>> [sorted(set(labels[indices].tolist())) for indices in Shards(2, shards_per_client=2)(labels, seed=0)]
        [[2, 3], [0, 1]]
    """

    num_clients: Count
    shards_per_client: Count = 2

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Cut the samples, sorted by class, into shards, and give random shards to each client.

        Raises:
            ConfigurationError: There are more shards than samples.
        """
        rng = np.random.default_rng(seed)
        check_enough_samples(len(values), self.num_clients, self.shards_per_client)
        num_shards = self.num_clients * self.shards_per_client
        by_class, _ = shuffled_by_class(values, rng)
        # Each client stands k times in it, at random places
        owner_of_shard = rng.permutation(num_shards) // self.shards_per_client
        owners = np.repeat(owner_of_shard, equal_sizes(len(values), num_shards))
        return Partition.from_owners(owners, self.num_clients, by_class)
