"""Train and test parts inside every client."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition import Partition

SplitOrder = Literal["shuffled", "ordered"]


def train_test_split(
    labels: np.ndarray | None,
    test_fraction: float = 0.2,
    order: SplitOrder = "shuffled",
    *,
    num_samples: int | None = None,
    rng: np.random.Generator | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Part one client's samples into training and test data.

    ``shuffled``: stratified, ``round(test_fraction * n_c)`` samples of each class c to test, a class of one sample to
    train. ``ordered``: the first ``floor((1 - test_fraction) * n)`` samples train and the rest test, as in FedBC's
    public code: under :class:`~fedbc_lightning.partition.PowerLaw` the test part holds mostly the client's last class.
    Either way a client of two samples or more keeps at least one in each part, and one of one sample only trains.

    Args:
        labels: Class of each sample ``(n,)`` in the client's order; None: not stratified.
        test_fraction: Of the samples, in (0, 1).
        order: ``"shuffled"`` or ``"ordered"``.
        num_samples: n, needed where ``labels`` is None.
        rng: Which samples are tested under ``shuffled``; by default seeded with 0.

    Returns:
        Positions of the training and of the test samples, int64, each ascending; together ``0..n-1``.

    Raises:
        ConfigurationError: ``test_fraction`` or ``order`` is impossible.

    Example:
        >>> train, test = train_test_split(np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1]))
        >>> len(train), len(test)
        (8, 2)
    """
    total = (num_samples or 0) if labels is None else len(labels)
    everything = Partition.from_parts([np.arange(total)])
    rng = np.random.default_rng(0) if rng is None else rng
    train, test = split_partition(everything, labels, test_fraction, order, rng)
    return train.indices, test.indices


def split_partition(
    partition: Partition, labels: np.ndarray | None, fraction: float, order: SplitOrder, rng: np.random.Generator
) -> tuple[Partition, Partition]:
    """Part every client's samples, by the rules of :func:`train_test_split`, in O(M log M) whatever N is.

    Args:
        partition: Which client has which samples.
        labels: Class of each sample of the data, integers ``(M,)``, not of the partition's; None: not stratified.
        fraction: Of each client's samples that go to the second part, in (0, 1).
        order: ``"shuffled"`` or ``"ordered"``.
        rng: Which samples go to the second part under ``shuffled``.

    Returns:
        Two partitions over the same clients; within each a client keeps its order.

    Raises:
        ConfigurationError: ``fraction`` or ``order`` is impossible.

    Example:
        >>> partition = Partition.from_sizes(np.arange(15), np.array([10, 5]))
        >>> train, test = split_partition(partition, None, 0.2, "ordered", np.random.default_rng(0))
        >>> [part.tolist() for part in test]
        [[8, 9], [14]]
    """
    check_split(fraction, order)
    sizes = partition.sizes
    if order == "ordered":
        num_first = np.clip(np.floor((1 - fraction) * sizes + 1e-9).astype(np.int64), 1, np.maximum(sizes - 1, 1))
        rank = np.arange(len(partition.indices)) - np.repeat(partition.offsets[:-1], sizes)
        is_second = rank >= np.repeat(num_first, sizes)
    else:
        is_second = _stratified_draw(partition, labels, fraction, rng)
    return partition.keep(~is_second), partition.keep(is_second)


def check_split(test_fraction: float, order: str = "shuffled", name: str = "test_fraction") -> None:
    """Raise :class:`ConfigurationError` unless the fraction is in (0, 1) and the order known."""
    if not 0 < test_fraction < 1:
        raise ConfigurationError(f"{name}={test_fraction}: give a fraction above 0 and below 1, e.g. 0.2")
    if order not in ("shuffled", "ordered"):
        raise ConfigurationError(f"split_order={order!r}: give 'shuffled' or 'ordered'")


def _stratified_draw(
    partition: Partition, labels: np.ndarray | None, fraction: float, rng: np.random.Generator
) -> np.ndarray:
    """Which of the partition's samples are drawn, bool ``(n,)``: of a client at least one, and not all."""
    group = partition.client_of_each()
    num_classes = 1
    if labels is not None:
        classes, column = np.unique(labels[partition.indices], return_inverse=True)
        num_classes = max(len(classes), 1)
        group = group * num_classes + column
    order = rng.permutation(len(group))
    order = order[np.argsort(group[order], kind="stable")]
    group = group[order]
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    sizes = np.diff(np.append(starts, len(group)))
    wanted = _draw_sizes(group[starts] // num_classes, sizes, fraction, partition.sizes, rng)
    rank = np.arange(len(group)) - np.repeat(starts, sizes)
    drawn = np.zeros(len(group), dtype=bool)
    drawn[order[rank < np.repeat(wanted, sizes)]] = True
    return drawn


def _draw_sizes(
    clients: np.ndarray, sizes: np.ndarray, fraction: float, client_sizes: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """How many to draw of each (client, class).

    Args:
        clients: Client of each group, ascending.
        sizes: Samples of each group.
        fraction: Wanted of each.
        client_sizes: ``(N,)``.
        rng: Which of a client's largest classes gives the sample that keeps a part from being empty.
    """
    wanted = np.floor(fraction * sizes + 0.5).astype(np.int64)
    wanted[sizes == 1] = 0
    total = np.zeros(len(client_sizes), dtype=np.int64)
    np.add.at(total, clients, wanted)
    by_size = np.lexsort((rng.random(len(sizes)), -sizes, clients))  # else low classes would be tested more often
    largest = by_size[np.flatnonzero(np.diff(clients, prepend=-1))]
    total, client_sizes = total[clients[largest]], client_sizes[clients[largest]]
    wanted[largest[(total == 0) & (client_sizes > 1)]] += 1
    wanted[largest[(total == client_sizes) & (client_sizes > 1)]] -= 1
    return wanted
