"""Partition of the FedBC paper: sizes by a power law, and few classes per client."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable, Iterator
from typing import Literal

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

    The style ``public`` makes the draws of the FedBC authors' public code. With seed 1, which its scripts have, these
    give 27 of the 30 cells of the paper's Table 4; two of the others no such procedure can give. Use ``split_order:
    ordered`` with it, as the public code cuts off each client's test data.

    Args:
        num_clients: Number of clients N; client 0 is the smallest, client N-1 the largest.
        classes_per_client: C of the paper (1, 2 or 3 there), from 1 to the number of classes.
        exponent: e of the paper (1.1 to 1.5 there), at least 1. With 1 sizes are equal, except that the last client
            takes all that is left over.
        style: How the draws are made. ``"own"``: the classes of each client come in an order of its own
            (:func:`split_power_law`). ``"public"``: as in the public code (:func:`split_power_law_publicly`).
        seed: Seed of the draws; None: a seed that the data module derives from its own.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> [len(indices) for indices in PowerLaw(4, classes_per_client=1, exponent=2.0)(labels, seed=0)]
        [67, 133, 267, 533]
    """

    num_clients: int

    def __init__(
        self,
        num_clients: int,
        classes_per_client: int = 2,
        exponent: float = 1.2,
        style: Literal["own", "public"] = "own",
        seed: int | None = None,
    ) -> None:
        self.num_clients = whole("num_clients", num_clients, 1)
        self.classes_per_client = whole("classes_per_client", classes_per_client, 1)
        self.exponent = exponent
        if not 1 <= exponent < math.inf:
            raise ConfigurationError(
                f"exponent={exponent}: each client is `exponent` times the one before; give 1 or more"
            )
        if style not in ("own", "public"):
            raise ConfigurationError(f"style={style!r}: give 'own' or 'public'")
        self.style = style
        self.seed = None if seed is None else whole("seed", seed, 0)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples by the draws of the chosen style; `seed` is that of the data module."""
        seed = seed if self.seed is None else self.seed
        if self.style == "public":
            return split_power_law_publicly(
                values, self.num_clients, self.classes_per_client, self.exponent, random.Random(seed)
            )
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
    for client, share in _hand_out(int(num_samples - sizes.sum()), num_clients, exponent):
        sizes[client] += share
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
    sizes = power_law_sizes(len(labels), num_clients, exponent)
    filling = _Filling(sizes, classes_per_client, class_sizes)
    filling.fill(_independent_orders(rng, num_clients, len(class_sizes)))
    for label in range(len(class_sizes)):
        filling.give(label, reversed(_hand_out(filling.left[label], num_clients, exponent)))
    return filling.deal(by_class)


def split_power_law_publicly(
    labels: np.ndarray, num_clients: int, classes_per_client: int, exponent: float, rng: random.Random
) -> Partition:
    """Fill clients as :func:`split_power_law` does, with the draws of the FedBC authors' public code.

    One list of the classes is shuffled anew for each client, from the order that the client before has left. What is
    left over at the end goes from the largest client down, class by class in the last order of that list. Each class
    gives its samples in the order of the data.

    Args:
        labels: Class of each sample, integers ``(M,)``, the training data before the test data.
        num_clients: Number of clients N.
        classes_per_client: Number of classes per client C.
        exponent: e of the paper, at least 1.
        rng: Python's generator, which draws the orders of the classes; ``random.Random(1)`` in the public scripts.

    Returns:
        The partition, with each client's samples in the order in which it was filled.

    Raises:
        ConfigurationError: There are more clients than samples, or C is above the number of classes.
    """
    by_class = np.argsort(labels, kind="stable")
    class_sizes = np.unique(labels, return_counts=True)[1]
    sizes = power_law_sizes(len(labels), num_clients, exponent)
    filling = _Filling(sizes, classes_per_client, class_sizes)
    classes = list(range(len(class_sizes)))
    filling.fill(_shuffled_again(rng, classes))
    for label in classes:
        filling.give(label, _hand_out(filling.left[label], num_clients, exponent))
    return filling.deal(by_class)


def _independent_orders(rng: np.random.Generator, num_clients: int, num_classes: int) -> Iterator[list[int]]:
    """Yield one random order of the classes for each client."""
    for start in range(0, num_clients, CLIENTS_PER_BLOCK):
        num_rows = min(CLIENTS_PER_BLOCK, num_clients - start)
        yield from rng.permuted(np.tile(np.arange(num_classes), (num_rows, 1)), axis=1).tolist()


def _shuffled_again(rng: random.Random, classes: list[int]) -> Iterator[list[int]]:
    """Shuffle the same list in place before each client, and yield it."""
    while True:
        rng.shuffle(classes)
        yield classes


class _Filling:
    """Clients that are being filled with samples, which so far are counted only.

    Args:
        sizes: Size s_k of each client ``(N,)``.
        classes_per_client: Number of classes per client C.
        class_sizes: Number of samples of each class ``(num_classes,)``.

    Attributes:
        left: Number of samples of each class that nobody has got yet.

    Raises:
        ConfigurationError: C is above the number of classes.
    """

    def __init__(self, sizes: np.ndarray, classes_per_client: int, class_sizes: np.ndarray) -> None:
        num_classes = len(class_sizes)
        if classes_per_client > num_classes:
            raise ConfigurationError(
                f"classes_per_client={classes_per_client}: the data has {num_classes} classes; give 1 to {num_classes}"
            )
        self.sizes, self.classes_per_client = sizes, classes_per_client
        self.left: list[int] = class_sizes.tolist()
        self._gifts = array("q"), array("q"), array("q")  # client, class, number of samples, in the order of filling

    def fill(self, orders: Iterable[list[int]]) -> None:
        """Fill the clients, the smallest first, each from the classes in its order, ⌈s_k / C⌉ of a class at most."""
        for client, (size, order) in enumerate(zip(self.sizes.tolist(), orders, strict=False)):
            at_most = -(-size // self.classes_per_client)
            for label in order:
                given = min(at_most, self.left[label], size)
                if given:
                    self.left[label] -= given
                    size -= given
                    self._record(client, label, given)
                if not size:
                    break

    def give(self, label: int, takers: Iterable[tuple[int, int]]) -> None:
        """Give samples of a class to clients in turn.

        Args:
            label: The class.
            takers: Clients and numbers of samples.
        """
        for client, given in takers:
            self.left[label] -= given
            self._record(client, label, given)

    def _record(self, *gift: int) -> None:
        for column, value in zip(self._gifts, gift, strict=True):
            column.append(value)

    def deal(self, by_class: np.ndarray) -> Partition:
        """Return the partition; all samples of every class must have been given.

        Args:
            by_class: Sample indices ordered by class, ``(M,)``; each gift takes the next ones of its class.
        """
        clients, classes, counts = (np.array(column) for column in self._gifts)
        return _deal(by_class, clients, classes, counts, len(self.sizes))


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
