"""Partition of the samples, sorted by class, into equal shards."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedbc_lightning.core.checks import at_least, check_arguments
from fedbc_lightning.partition.base import NumClients, Partition, Partitioner, check_enough_samples
from fedbc_lightning.partition.dealing import shuffled_by_class
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

    def __init__(self, num_clients: NumClients, shards_per_client: Annotated[int, at_least(1)] = 2) -> None:
        check_arguments(Shards, locals(), "data.partitioner")
        self.num_clients, self.shards_per_client = num_clients, shards_per_client

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Cut the samples, sorted by class, into shards, and give random shards to each client.

        Raises:
            ConfigurationError: There are more shards than samples.
        """
        rng = np.random.default_rng(seed)
        check_enough_samples(len(values), self.num_clients, self.shards_per_client, "shards_per_client")
        num_shards = self.num_clients * self.shards_per_client
        by_class, _ = shuffled_by_class(values, rng)
        # Each client stands k times in it, at random places
        owner_of_shard = rng.permutation(num_shards) // self.shards_per_client
        owners = np.repeat(owner_of_shard, equal_sizes(len(values), num_shards))
        return Partition.from_owners(owners, self.num_clients, by_class)
