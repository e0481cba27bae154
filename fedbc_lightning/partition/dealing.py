"""Tools that partitioners share: samples ordered by class, whole numbers in proportion, and counts of classes."""

from __future__ import annotations

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError


def shuffled_by_class(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Order all samples by class, and shuffle them within each class.

    Args:
        labels: Class of each sample, integers ``(M,)``.
        rng: Generator of the order within a class.

    Returns:
        Sample indices ``(M,)``, with the classes in sorted order, and the size of each class ``(num_classes,)``.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    ends = np.append(np.flatnonzero(np.diff(labels[order])) + 1, len(labels))
    return order, np.diff(ends, prepend=0)


def apportion(
    total: int, weights: np.ndarray, least: np.ndarray | int = 1, most: np.ndarray | None = None
) -> np.ndarray:
    """Return whole numbers in proportion to the weights, between bounds, with the sum ``total``.

    Shares are ``t * weights``, clipped to the bounds, with the t for which they sum to ``total``. They are rounded
    down, and the units that are then missing go one by one to the largest remainders, of equal ones to the first.

    Args:
        total: Sum of the numbers, between ``sum(least)`` and ``sum(most)``.
        weights: Weights above 0, ``(n,)``; those below 1e-12 of the largest are raised to that.
        least: Lower bounds, one number or ``(n,)``.
        most: Upper bounds, ``(n,)``; None is ``total`` for each.

    Returns:
        The numbers, int64 ``(n,)``.

    Example:
        >>> apportion(10, np.array([1.0, 2.0, 3.0])).tolist(), apportion(10, np.array([1.0, 2.0, 300.0])).tolist()
        ([2, 3, 5], [1, 1, 8])
    """
    weights = np.maximum(weights / weights.max(), 1e-12)
    most = np.full(len(weights), total) if most is None else most
    high = 1.0
    while np.clip(high * weights, least, most).sum() < total:
        high *= 2
    # Bisection down to neighbouring floats: the sum of clipped shares grows with t, but has no inverse in closed form
    low = 0.0
    while low < (middle := (low + high) / 2) < high:
        if np.clip(middle * weights, least, most).sum() < total:
            low = middle
        else:
            high = middle
    shares = np.clip(high * weights, least, most)
    free = (least < shares) & (shares < most)
    shares[free] = (total - shares[~free].sum()) * (weights[free] / weights[free].sum())
    # 1e-9: the t that was found is exact up to rounding, and must not turn a whole share of 3 into 2.99..., then 2
    whole_shares = np.floor(shares + 1e-9)
    missing = int(total - whole_shares.sum())
    whole_shares[np.argsort(whole_shares - shares, kind="stable")[:missing]] += 1
    return whole_shares.astype(np.int64)


def check_num_classes(classes_per_client: int, num_classes: int) -> None:
    """Check that the data have as many classes as each client shall hold.

    Raises:
        ConfigurationError: They have fewer.
    """
    if classes_per_client > num_classes:
        raise ConfigurationError(
            f"data.partitioner.classes_per_client={classes_per_client}: the data has {num_classes} classes; give 1 to "
            f"{num_classes}"
        )


# Largest table of clients and classes that is counted; labels with more distinct values are hardly classes
MAX_CELLS = 50_000_000


def count_labels(labels: np.ndarray, clients: np.ndarray, num_clients: int) -> np.ndarray | None:
    """Count the samples of each class at each client.

    Args:
        labels: Class of each sample, integers ``(n,)``.
        clients: Client of each sample, 0..N-1, ``(n,)``.
        num_clients: Number of clients N.

    Returns:
        The counts, int64 ``(N, num_classes)``. Columns are the classes 0..max, or the distinct values of ``labels`` if
        some are negative or if they are few compared with the largest. None if there were more than :data:`MAX_CELLS`
        counts.
    """
    values, columns = np.unique(labels, return_inverse=True)
    num_classes = len(values)
    # A class that no client has keeps its column, but ids of users do not get a column for each number between them.
    if num_classes and values[0] >= 0 and values[-1] < 10 * num_classes:
        columns, num_classes = values[columns], int(values[-1]) + 1
    if num_clients * num_classes > MAX_CELLS:
        return None
    counts = np.bincount(clients * num_classes + columns, minlength=num_clients * num_classes)
    return counts.reshape(num_clients, num_classes)
