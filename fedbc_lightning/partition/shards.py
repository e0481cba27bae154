"""Partition of the samples, sorted by class, into equal shards."""

from __future__ import annotations

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner
from fedbc_lightning.partition.dealing import check_enough_samples, shuffled_by_class, whole
from fedbc_lightning.partition.sizes import equal_sizes


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

    num_clients: int

    def __init__(self, num_clients: int, shards_per_client: int = 2) -> None:
        self.num_clients = whole("num_clients", num_clients, 1)
        self.shards_per_client = whole("shards_per_client", shards_per_client, 1)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples with :func:`split_shards`."""
        return split_shards(values, self.num_clients, self.shards_per_client, np.random.default_rng(seed))


def split_shards(labels: np.ndarray, num_clients: int, shards_per_client: int, rng: np.random.Generator) -> Partition:
    """Cut the samples, sorted by class, into shards, and give ``shards_per_client`` random shards to each client.

    Args:
        labels: Class of each sample, integers ``(M,)``.
        num_clients: Number of clients N.
        shards_per_client: Number of shards per client k.
        rng: Generator of the order of samples within a class and of the shards of each client.

    Raises:
        ConfigurationError: There are more shards than samples.
    """
    check_enough_samples(len(labels), num_clients)
    num_shards = num_clients * shards_per_client
    if num_shards > len(labels):
        raise ConfigurationError(
            f"shards_per_client={shards_per_client}: num_clients={num_clients} clients make {num_shards} shards, the "
            f"data has {len(labels)} samples; give at most {len(labels) // num_clients}"
        )
    by_class, _ = shuffled_by_class(labels, rng)
    owner_of_shard = rng.permutation(num_shards) // shards_per_client
    owners = np.repeat(owner_of_shard, equal_sizes(len(labels), num_shards))
    return Partition.from_owners(owners, num_clients, by_class)
