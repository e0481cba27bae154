"""Partition of the FedBC paper: sizes by a power law, and few classes per client."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from fedbc_lightning.core.checks import FINITE, Count, Number, at_least, checked
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner, check_enough_samples
from fedbc_lightning.partition.dealing import check_num_classes, shuffled_by_class


@checked("data.partitioner")
@dataclass(eq=False)
class PowerLaw(Partitioner):
    """Gives client k few classes and a size in proportion to e^k (FedBC, Table 5; after Stripelis & Ambite 2020).

    Sizes are those of :func:`power_law_sizes`. Each client draws its samples from ``classes_per_client`` classes. It
    gets more classes only if one of them has run out or, for C >= 2 and small e, from samples left over at the end.
    Each client's indices are ordered by class, in the order in which the client was filled.

    The style ``public`` makes the draws of the FedBC authors' public code. With seed 1, which its scripts have, these
    give 27 of the 30 cells of the paper's Table 4; two of the others no such procedure can give. Use ``split_order:
    ordered`` with it, as the public code cuts off each client's test data.

    Args:
        num_clients: Number of clients N; client 0 is the smallest, client N-1 the largest.
        classes_per_client: C of the paper (1, 2 or 3 there), from 1 to the number of classes.
        exponent: e of the paper (1.1 to 1.5 there), at least 1. With 1 sizes are equal, except that the last client
            takes all that is left over.
        style: How the draws are made. ``"own"``: the classes of each client come in an order of its own. ``"public"``,
            as in the public code: one list of the classes is shuffled anew for each client, and each class gives its
            samples in the order of the data.
        seed: Seed of the draws; None: a seed that the data module derives from its own.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> [len(indices) for indices in PowerLaw(4, classes_per_client=1, exponent=2.0)(labels, seed=0)]
        [67, 133, 267, 533]
    """

    num_clients: Count
    classes_per_client: Count = 2
    exponent: Annotated[float, at_least(1), FINITE] = 1.2
    style: Literal["own", "public"] = "own"
    seed: Number | None = None

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Fill clients of :func:`power_law_sizes`, the smallest first, each from the classes in a random order.

        Each class gives at most ⌈s_k / C⌉ samples to client k, until the client is full. The samples left at the end
        are handed out class by class from the largest client down, ⌈left / e⌉ to each.

        Args:
            values: Class of each sample, integers ``(M,)``; for the style ``public`` the training data come first.
            seed: Seed of the draws, unless ``self.seed`` is another one.

        Raises:
            ConfigurationError: There are more clients than samples, or C is above the number of classes.
        """
        seed = seed if self.seed is None else self.seed
        sizes = power_law_sizes(len(values), self.num_clients, self.exponent)
        is_public, class_sizes = self.style == "public", np.unique(values, return_counts=True)[1]
        check_num_classes(self.classes_per_client, len(class_sizes))
        classes, left = list(range(len(class_sizes))), class_sizes.tolist()
        orders: Iterator[list[int]]
        if is_public:
            by_class = np.argsort(values, kind="stable")
            orders = _shuffled_again(random.Random(seed), classes)
        else:
            rng = np.random.default_rng(seed)
            by_class, _ = shuffled_by_class(values, rng)
            orders = (rng.permutation(len(classes)).tolist() for _ in sizes)
        # Client, class and number of samples of each gift, in the order of filling. Samples are counted only, in an
        # array: a Python object for each gift would take more memory than the data of many small clients.
        gifts = array("q")
        for client, (size, order) in enumerate(zip(sizes.tolist(), orders, strict=False)):
            at_most = -(-size // self.classes_per_client)
            for label in order:
                if given := min(at_most, left[label], size):
                    gifts.extend((client, label, given))
                    left[label], size = left[label] - given, size - given
                if not size:
                    break
        # The public code goes through the classes in the last order of its list, which has been shuffled in place, and
        # the largest client takes the first of the samples that are left; in the own style it takes the last ones.
        for label in classes:
            takers = _hand_out(left[label], self.num_clients, self.exponent)
            for client, given in takers if is_public else reversed(takers):
                gifts.extend((client, label, given))
        return _deal(by_class, np.array(gifts).reshape(-1, 3), self.num_clients)


def power_law_sizes(num_samples: int, num_clients: int, exponent: float) -> np.ndarray:
    """Return the client sizes s_1 <= ... <= s_N of the FedBC paper, int64 ``(N,)``, with sum M.

    With b = ⌊M / Σ_k e^k⌋, s_k = ⌊e^k b⌋. The remainder is handed out from the largest client down; each takes
    ⌈r / e⌉ of the r samples that are left.

    Args:
        num_samples: Number of samples M.
        num_clients: Number of clients N.
        exponent: e of the paper, at least 1.

    Raises:
        ConfigurationError: A client would get no sample.

    Example:
        >>> sizes = power_law_sizes(60_000, 20, 1.3)  # CIFAR-10, the paper's Table 5
        >>> int(sizes.min()), int(sizes.max())
        (94, 14032)
    """
    check_enough_samples(num_samples, num_clients)
    # A power that overflows to inf makes the unit 0, which is refused below.
    with np.errstate(over="ignore"):
        powers = np.float64(exponent) ** np.arange(1, num_clients + 1)
    unit = num_samples // powers.sum()
    if unit < 1:
        raise ConfigurationError(
            f"data.partitioner.exponent={exponent}: {num_samples} samples cannot be split by this power law over "
            f"num_clients={num_clients} without empty clients; lower the exponent or the number of clients"
        )
    sizes = np.floor(powers * unit).astype(np.int64)
    for client, share in _hand_out(int(num_samples - sizes.sum()), num_clients, exponent):
        sizes[client] += share
    return sizes


def _shuffled_again(rng: random.Random, classes: list[int]) -> Iterator[list[int]]:
    """Shuffle the same list in place before each client, and yield it."""
    while True:
        rng.shuffle(classes)
        yield classes


def _deal(by_class: np.ndarray, gifts: np.ndarray, num_clients: int) -> Partition:
    """Return the partition in which each gift takes the next samples of its class.

    Args:
        by_class: Sample indices ordered by class, ``(M,)``.
        gifts: Client, class and number of samples of each gift, ``(G, 3)``; the numbers sum to M.
        num_clients: Number of clients N.
    """
    clients, classes, counts = gifts.T
    order = np.argsort(classes, kind="stable")
    starts = np.empty_like(counts)  # place in by_class at which each gift begins
    starts[order] = np.cumsum(counts[order]) - counts[order]
    order = np.argsort(clients, kind="stable")
    starts, counts = starts[order], counts[order]
    # Position k of the result is in the gift that covers it: the gift's start, moved by k minus the gift's end
    shift = starts - (np.cumsum(counts) - counts)
    positions = np.repeat(shift, counts) + np.arange(len(by_class))
    sizes = np.zeros(num_clients, dtype=np.int64)
    np.add.at(sizes, clients[order], counts)
    return Partition.from_sizes(by_class[positions], sizes)


def _hand_out(left: int, num_clients: int, exponent: float) -> list[tuple[int, int]]:
    """Hand out the samples that are left: ⌈left / e⌉ to each client, from the last one down, until none is left.

    Returns:
        The clients in the order in which they take samples, each with the number that it takes.
    """
    takers: list[tuple[int, int]] = []
    while left:
        takers.append(((-1 - len(takers)) % num_clients, math.ceil(left / exponent)))
        left -= takers[-1][1]
    return takers
