"""What partitioners share: checks of their arguments, samples class by class, and shares in whole numbers."""

from __future__ import annotations

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError


def shuffled_by_class(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """All samples class by class, shuffled within each.

    Args:
        labels: Class of each sample, integers ``(M,)``.
        rng: Order within a class.

    Returns:
        Sample indices ``(M,)``, classes in sorted order; and the size of each class ``(num_classes,)``.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    ends = np.append(np.flatnonzero(np.diff(labels[order])) + 1, len(labels))
    return order, np.diff(ends, prepend=0)


def whole(name: str, value: int, minimum: int) -> int:
    """The value, a whole number of at least ``minimum``.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise ConfigurationError(f"{name}={value}: give a whole number, {minimum} or more")
    return int(value)


def check_enough_samples(num_samples: int, num_clients: int) -> None:
    """Every client gets a sample.

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
    """Whole numbers in proportion to the weights, between bounds, with the sum ``total``.

    Shares are ``t * weights``, raised to ``least`` and lowered to ``most``, with the t that gives the total; they are
    rounded down, and what is missing goes one by one to the largest remainders (of equal ones to the first).

    Args:
        total: The sum, from ``sum(least)`` to ``sum(most)``.
        weights: Above 0, ``(n,)``; below 1e-12 of the largest they count as that much.
        least: Lower bounds.
        most: Upper bounds; None: ``total``.

    Returns:
        int64 ``(n,)``.

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
    """The sigma of a log-normal distribution, from 0 to 10.

    Raises:
        ConfigurationError: It is not.
    """
    if not 0 <= sigma <= 10:
        raise ConfigurationError(f"{name}={sigma}: the sigma of the log-normal sizes must be in [0, 10]; give e.g. 1.0")
    return sigma


def check_min_samples(num_samples: int, num_clients: int, min_samples: int) -> None:
    """Every client can have ``min_samples``.

    Raises:
        ConfigurationError: There are not enough samples for that.
    """
    if num_clients * min_samples > num_samples:
        raise ConfigurationError(
            f"min_samples={min_samples}: num_clients={num_clients} clients would need {num_clients * min_samples} "
            f"samples, the data has {num_samples}; give at most {num_samples // num_clients}"
        )
