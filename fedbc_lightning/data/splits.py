"""Splits into what trains and what tests: the samples of every client, and the clients that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedbc_lightning.core import seeding
from fedbc_lightning.core.clients import find_clients
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition import Partition

SplitOrder = Literal["shuffled", "ordered"]


def split_partition(
    partition: Partition, labels: np.ndarray | None, fraction: float, order: SplitOrder, rng: np.random.Generator
) -> tuple[Partition, Partition]:
    """Split every client's samples into two parts, such as training and test data, in O(M log M) time.

    With ``shuffled`` the split is stratified: ``round(fraction * n_c)`` random samples of each class c go to the second
    part; the sample of a class with only one stays in the first. With ``ordered`` the first
    ``floor((1 - fraction) * n)`` samples are the first part and the rest the second, as in FedBC's public code; with
    :class:`~fedbc_lightning.partition.PowerLaw` the second part is then mostly of the client's last class. Either way a
    client with two samples or more has at least one in each part, and a single sample is in the first.

    Args:
        partition: Assignment of samples to clients.
        labels: Class of each sample of the whole data, integers ``(M,)``, so that a sample's index is its place here;
            with None the split is not stratified.
        fraction: Fraction of each client's samples that go to the second part, in (0, 1).
        order: How to choose the second part, ``"shuffled"`` or ``"ordered"``.
        rng: Generator of the choice under ``shuffled``.

    Returns:
        Two partitions over the same clients; each client's samples keep their order in both.

    Example:
        >>> partition = Partition.from_sizes(np.arange(15), np.array([10, 5]))
        >>> train, test = split_partition(partition, None, 0.2, "ordered", np.random.default_rng(0))
        >>> [part.tolist() for part in test]
        [[8, 9], [14]]
    """
    sizes = partition.sizes
    if order == "ordered":
        # 1e-9 undoes rounding: of 10 samples with a fraction of 0.9, (1 - 0.9) * 10 is 0.9999999999999998 in float64.
        num_first = np.clip(np.floor((1 - fraction) * sizes + 1e-9).astype(np.int64), 1, np.maximum(sizes - 1, 1))
        rank = np.arange(len(partition.indices)) - np.repeat(partition.offsets[:-1], sizes)
        is_second = rank >= np.repeat(num_first, sizes)
    else:
        is_second = _stratified_draw(partition, labels, fraction, rng)
    return partition.keep(~is_second), partition.keep(is_second)


def _stratified_draw(
    partition: Partition, labels: np.ndarray | None, fraction: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw a fraction of each client's samples, stratified by class, at least one and not all of them.

    Returns:
        Whether each entry of the partition's ``indices`` is drawn, bool ``(n,)``.
    """
    group = partition.client_of_each()
    num_classes = 1
    if labels is not None:
        classes, column = np.unique(labels[partition.indices], return_inverse=True)
        num_classes = max(len(classes), 1)
        group = group * num_classes + column
    # The stable sort of a random order shuffles the samples within each group, for all clients at once.
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
    """Return how many samples to draw of each group, where a group is the samples of a class at a client.

    Args:
        clients: Client of each group, ascending.
        sizes: Number of samples of each group.
        fraction: Fraction of each group that is to be drawn.
        client_sizes: Number of samples of each client, ``(N,)``.
        rng: Generator that chooses among a client's largest groups the one whose number is changed by one if otherwise
            none or all of the client's samples would be drawn.
    """
    # Halves go up; np.rint would round them to the even number, 2.5 down and 3.5 up.
    wanted = np.floor(fraction * sizes + 0.5).astype(np.int64)
    wanted[sizes == 1] = 0
    total = np.zeros(len(client_sizes), dtype=np.int64)
    np.add.at(total, clients, wanted)
    # Ties between groups of equal size are broken at random: low classes would be drawn more often otherwise.
    by_size = np.lexsort((rng.random(len(sizes)), -sizes, clients))
    largest = by_size[np.flatnonzero(np.diff(clients, prepend=-1))]
    total, client_sizes = total[clients[largest]], client_sizes[clients[largest]]
    wanted[largest[(total == 0) & (client_sizes > 1)]] += 1
    wanted[largest[(total == client_sizes) & (client_sizes > 1)]] -= 1
    return wanted


# Setting data.heldout_clients: a number of clients, a fraction of them, their names or numbers, or None
Heldout = int | float | Sequence[str | int] | None

WHERE = "data.heldout_clients"


def find_heldout(asked: Heldout, num_clients: int, names: Sequence[str] | None, seed: int) -> np.ndarray:
    """Return the clients that are held out, which are drawn by the seed alone unless they are listed.

    Args:
        asked: A number of clients, a fraction of them in (0, 1), or a list of names or numbers; None or 0: no client.
        num_clients: Number of all clients, N.
        names: Names of the clients; None if they have none.
        seed: Seed of the draw, the one by which the data are dealt.

    Returns:
        The numbers of the clients, int64, ascending.

    Raises:
        ConfigurationError: The value is impossible, a listed client does not exist, or no client would train.

    Example:
        >>> find_heldout(["b", 0], 3, ["a", "b", "c"], seed=0).tolist(), len(find_heldout(0.2, 10, None, seed=0))
        ([0, 1], 2)
    """
    # False is equal to 0, but no number of clients: it is refused below.
    if asked is None or (asked == 0 and not isinstance(asked, bool)):
        return np.zeros(0, dtype=np.int64)
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        found = sorted(set(find_clients(asked, num_clients, names, WHERE)))
    else:
        count = _count(asked, num_clients)
        found = seeding.numpy_generator(seed, "heldout clients").choice(num_clients, count, replace=False).tolist()
    if len(found) >= num_clients:
        raise ConfigurationError(f"{WHERE}: all {num_clients} clients are held out, so that nobody trains; list fewer.")
    return np.sort(np.array(found, dtype=np.int64))


def _count(asked: object, num_clients: int) -> int:
    """Return how many clients a number or a fraction holds out, at least one."""
    if isinstance(asked, float) and 0 < asked < 1:
        # At least one, or there would be no metric of them; not all, or nobody would train
        return min(max(1, round(asked * num_clients)), num_clients - 1)
    if isinstance(asked, int) and not isinstance(asked, bool) and 0 < asked < num_clients:
        return asked
    raise ConfigurationError(
        f"{WHERE}: got {asked!r}; give a fraction in (0, 1), a whole number from 1 to {num_clients - 1} (the data has "
        f"{num_clients} clients), or a list of clients' names or numbers."
    )
