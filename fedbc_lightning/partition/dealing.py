"""Tools that partitioners share: checks of arguments, samples ordered by class, and proportional whole numbers."""

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


def whole(name: str, value: int, minimum: int) -> int:
    """Return ``value`` as an ``int`` after checking that it is a whole number of at least ``minimum``.

    Args:
        name: Name of the argument, for the message.
        value: Value that the user gave.
        minimum: Smallest value allowed.

    Raises:
        ConfigurationError: ``value`` is not whole, or is too small.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise ConfigurationError(f"{name}={value}: give a whole number, {minimum} or more")
    return int(value)


def check_enough_samples(num_samples: int, num_clients: int) -> None:
    """Check that there is at least one sample for every client.

    Raises:
        ConfigurationError: There are fewer samples than clients.
    """
    if num_clients > num_samples:
        raise ConfigurationError(
            f"num_clients={num_clients}: the data has only {num_samples} samples; give at most {num_samples} clients"
        )


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
    low = 0.0
    while low < (middle := (low + high) / 2) < high:
        if np.clip(middle * weights, least, most).sum() < total:
            low = middle
        else:
            high = middle
    shares = np.clip(high * weights, least, most)
    free = (least < shares) & (shares < most)
    shares[free] = (total - shares[~free].sum()) * (weights[free] / weights[free].sum())
    whole_shares = np.floor(shares + 1e-9)
    missing = int(total - whole_shares.sum())
    whole_shares[np.argsort(whole_shares - shares, kind="stable")[:missing]] += 1
    return whole_shares.astype(np.int64)


def check_spread(name: str, sigma: float) -> float:
    """Return ``sigma``, the spread of a log-normal distribution, after checking that it is in [0, 10].

    Raises:
        ConfigurationError: ``sigma`` is outside [0, 10].
    """
    if not 0 <= sigma <= 10:
        raise ConfigurationError(f"{name}={sigma}: the sigma of the log-normal sizes must be in [0, 10]; give e.g. 1.0")
    return sigma


def check_min_samples(num_samples: int, num_clients: int, min_samples: int) -> None:
    """Check that there are enough samples to give every client ``min_samples``.

    Raises:
        ConfigurationError: There are not enough samples.
    """
    if num_clients * min_samples > num_samples:
        raise ConfigurationError(
            f"min_samples={min_samples}: num_clients={num_clients} clients would need {num_clients * min_samples} "
            f"samples, the data has {num_samples}; give at most {num_samples // num_clients}"
        )
