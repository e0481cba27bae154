"""Partition of the FedBC paper: sizes by a power law, and few classes per client."""

from __future__ import annotations

import math
from array import array

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner
from fedbc_lightning.partition.dealing import check_enough_samples, shuffled_by_class, whole

CLIENTS_PER_BLOCK = 4096


class PowerLaw(Partitioner):
    """Gives client k few classes and a size in proportion to e^k (FedBC, Table 5; after Stripelis & Ambite 2020).

    Sizes are those of :func:`power_law_sizes`. Each client draws its samples from ``classes_per_client`` classes. It
    gets more classes only if one of them has run out or, for C >= 2 and small e, from samples left over at the end.
    Each client's indices are ordered by class, in the order in which the client was filled.

    Args:
        num_clients: Number of clients N; client 0 is the smallest, client N-1 the largest.
        classes_per_client: C of the paper (1, 2 or 3 there), from 1 to the number of classes.
        exponent: e of the paper (1.1 to 1.5 there), at least 1. With 1 sizes are equal, except that the last client
            takes all that is left over.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> [len(indices) for indices in PowerLaw(4, classes_per_client=1, exponent=2.0)(labels, seed=0)]
        [67, 133, 267, 533]
    """

    num_clients: int

    def __init__(self, num_clients: int, classes_per_client: int = 2, exponent: float = 1.2) -> None:
        self.num_clients = whole("num_clients", num_clients, 1)
        self.classes_per_client = whole("classes_per_client", classes_per_client, 1)
        self.exponent = exponent
        if not 1 <= exponent < math.inf:
            raise ConfigurationError(
                f"exponent={exponent}: each client is `exponent` times the one before; give 1 or more"
            )

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples with :func:`split_power_law`."""
        rng = np.random.default_rng(seed)
        return split_power_law(values, self.num_clients, self.classes_per_client, self.exponent, rng)


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
    with np.errstate(over="ignore"):
        powers = np.float64(exponent) ** np.arange(1, num_clients + 1)
    unit = num_samples // powers.sum()
    if unit < 1:
        raise ConfigurationError(
            f"exponent={exponent}: {num_samples} samples cannot be split by this power law over num_clients="
            f"{num_clients} without empty clients; lower the exponent or the number of clients"
        )
    sizes = np.floor(powers * unit).astype(np.int64)
    clients, shares = _hand_out(int(num_samples - sizes.sum()), num_clients, exponent)
    np.add.at(sizes, clients, shares)
    return sizes


def split_power_law(
    labels: np.ndarray, num_clients: int, classes_per_client: int, exponent: float, rng: np.random.Generator
) -> Partition:
    """Fill clients of the sizes :func:`power_law_sizes`, the smallest first, each from the classes in a random order.

    Each class gives at most ⌈s_k / C⌉ samples to client k, until the client is full. The samples left at the end are
    handed out class by class from the largest client down, ⌈left / e⌉ to each.

    Args:
        labels: Class of each sample, integers ``(M,)``.
        num_clients: Number of clients N.
        classes_per_client: Number of classes per client C.
        exponent: e of the paper, at least 1.
        rng: Generator of the order of samples and classes.

    Returns:
        The partition, with each client's samples in the order in which it was filled.

    Raises:
        ConfigurationError: There are more clients than samples, or C is above the number of classes.
    """
    by_class, class_sizes = shuffled_by_class(labels, rng)
    num_classes = len(class_sizes)
    if classes_per_client > num_classes:
        raise ConfigurationError(
            f"classes_per_client={classes_per_client}: the data has {num_classes} classes; give 1 to {num_classes}"
        )
    sizes = power_law_sizes(len(labels), num_clients, exponent)
    left = class_sizes.tolist()
    gifts = [array("q"), array("q"), array("q")]  # client, class, number of samples, in the order of filling
    for start in range(0, num_clients, CLIENTS_PER_BLOCK):
        block = sizes[start : start + CLIENTS_PER_BLOCK].tolist()
        orders = rng.permuted(np.tile(np.arange(num_classes), (len(block), 1)), axis=1)
        for client, (size, order) in enumerate(zip(block, orders, strict=True), start):
            _fill(client, size, -(-size // classes_per_client), order.tolist(), left, gifts)
    for label in range(num_classes):
        takers, shares = _hand_out(left[label], num_clients, exponent)
        gifts[0].extend(takers[::-1])
        gifts[1].extend([label] * len(takers))
        gifts[2].extend(shares[::-1])
    clients, classes, counts = (np.array(column) for column in gifts)
    return _deal(by_class, clients, classes, counts, num_clients)


def _fill(client: int, size: int, at_most: int, order: list[int], left: list[int], gifts: list[array]) -> None:
    for label in order:
        given = min(at_most, left[label], size)
        if given:
            left[label] -= given
            size -= given
            for column, value in zip(gifts, (client, label, given), strict=True):
                column.append(value)
        if not size:
            return


def _hand_out(left: int, num_clients: int, exponent: float) -> tuple[list[int], list[int]]:
    """Hand out the samples that are left: ⌈left / e⌉ to each client, from the last one down, until none is left.

    Returns:
        The clients in the order in which they take samples, and the number that each takes.
    """
    clients: list[int] = []
    shares: list[int] = []
    while left:
        clients.append((-1 - len(clients)) % num_clients)
        shares.append(math.ceil(left / exponent))
        left -= shares[-1]
    return clients, shares


def _deal(
    by_class: np.ndarray, clients: np.ndarray, classes: np.ndarray, counts: np.ndarray, num_clients: int
) -> Partition:
    """Make the partition in which gift k gives the next ``counts[k]`` samples of ``classes[k]`` to ``clients[k]``.

    Together the gifts must take all samples of every class.

    Args:
        by_class: Sample indices ordered by class, ``(M,)``.
        clients: Client of each gift.
        classes: Class of each gift.
        counts: Number of samples of each gift.
        num_clients: Number of clients N.
    """
    order = np.argsort(classes, kind="stable")
    starts = np.empty_like(counts)
    starts[order] = np.cumsum(counts[order]) - counts[order]
    order = np.argsort(clients, kind="stable")
    starts, counts = starts[order], counts[order]
    shift = starts - (np.cumsum(counts) - counts)
    positions = np.repeat(shift, counts) + np.arange(len(by_class))
    sizes = np.zeros(num_clients, dtype=np.int64)
    np.add.at(sizes, clients[order], counts)
    return Partition.from_sizes(by_class[positions], sizes)
