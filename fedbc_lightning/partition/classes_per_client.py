"""Partition with exactly C classes per client."""

from __future__ import annotations

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition.base import Partition, Partitioner
from fedbc_lightning.partition.dealing import (
    apportion,
    check_enough_samples,
    check_spread,
    shuffled_by_class,
    whole,
)
from fedbc_lightning.partition.sizes import equal_sizes

SWAPS_PER_CLASS = 10


class ClassesPerClient(Partitioner):
    """Gives every client samples of exactly C classes.

    The number of clients that hold a class, from 1 to N, is in proportion to its number of samples. The samples of a
    class are shared equally among its holders, or unequally with ``size_spread``. Fed+ uses ``(200, 5)`` on FEMNIST,
    and on MNIST 1,000 clients of one digit each with "power-law" sizes; in FedProx's public code these are log-normal:
    ``(1000, 1, size_spread=2.0)``.

    Args:
        num_clients: Number of clients N; N * C must be at least the number of classes.
        classes_per_client: Number of classes per client C, from 1 to the number of classes.
        size_spread: Spread of the parts of a class, in [0, 10]. With 0 its holders get equal parts, up to one sample.
            Above 0 the parts are in proportion to exp(size_spread * z), with z ~ N(0, 1) for each holder of each class,
            and at least one sample.

    Raises:
        ConfigurationError: An argument is impossible.

    Example:
        >>> labels = np.arange(100) % 10
        >>> [len(np.unique(labels[indices])) for indices in ClassesPerClient(4, 3)(labels, seed=0)]
        [3, 3, 3, 3]
    """

    num_clients: int

    def __init__(self, num_clients: int, classes_per_client: int = 2, size_spread: float = 0.0) -> None:
        self.num_clients = whole("num_clients", num_clients, 1)
        self.classes_per_client = whole("classes_per_client", classes_per_client, 1)
        self.size_spread = check_spread("size_spread", size_spread)

    def __call__(self, values: np.ndarray, seed: int) -> Partition:
        """Split the samples with :func:`split_classes`."""
        rng = np.random.default_rng(seed)
        return split_classes(values, self.num_clients, self.classes_per_client, self.size_spread, rng)


def split_classes(
    labels: np.ndarray, num_clients: int, classes_per_client: int, size_spread: float, rng: np.random.Generator
) -> Partition:
    """Choose the clients that hold each class, then share the samples of each class among its holders.

    Args:
        labels: Class of each sample, integers ``(M,)``.
        num_clients: Number of clients N.
        classes_per_client: Number of classes per client C.
        size_spread: Sigma of the log-normal parts of a class; with 0 the parts are equal.
        rng: Generator of the order of samples, the holders of each class, and the sizes of their parts.

    Returns:
        The partition, with each client's samples ordered by class.

    Raises:
        ConfigurationError: Clients cannot all have C classes, or a class would have no holder.
    """
    check_enough_samples(len(labels), num_clients)
    by_class, class_sizes = shuffled_by_class(labels, rng)
    num_holders = count_holders(class_sizes, num_clients, classes_per_client)
    held = _draw_held(num_holders, num_clients, classes_per_client, rng).ravel()
    holders = np.argsort(held + rng.random(len(held))) // classes_per_client  # class by class, shuffled within each
    parts = []
    for size, number in zip(class_sizes, num_holders, strict=True):
        if size_spread:
            parts.append(apportion(size, rng.lognormal(0.0, size_spread, number)))
        else:
            parts.append(equal_sizes(size, number))
    return Partition.from_owners(np.repeat(holders, np.concatenate(parts)), num_clients, by_class)


def count_holders(class_sizes: np.ndarray, num_clients: int, classes_per_client: int) -> np.ndarray:
    """Return how many clients hold each class, int64 ``(num_classes,)``.

    The numbers sum to N * C and are in proportion to the sizes of the classes, rounded by largest remainders. Each is
    at least 1, at most N, and at most the number of samples of the class.

    Args:
        class_sizes: Number of samples of each class, ``(num_classes,)``.
        num_clients: Number of clients N.
        classes_per_client: Number of classes per client C.

    Raises:
        ConfigurationError: N * C is too small or too large for these bounds.

    Example:
        >>> count_holders(np.array([500, 300, 200]), num_clients=10, classes_per_client=1).tolist()
        [5, 3, 2]
    """
    num_classes, places = len(class_sizes), num_clients * classes_per_client
    if classes_per_client > num_classes:
        raise ConfigurationError(
            f"classes_per_client={classes_per_client}: the data has {num_classes} classes; give 1 to {num_classes}"
        )
    if places < num_classes:
        raise ConfigurationError(
            f"classes_per_client={classes_per_client}: num_clients={num_clients} clients hold at most {places} of the "
            f"data's {num_classes} classes; give at least {-(-num_classes // num_clients)}, or more clients"
        )
    most = np.minimum(class_sizes, num_clients)
    if places > most.sum():
        raise ConfigurationError(
            f"classes_per_client={classes_per_client}: num_clients={num_clients} clients need {places} (client, class) "
            f"pairs with a sample each, the data's class sizes allow {most.sum()}; give at most "
            f"{most.sum() // num_clients}, or fewer clients"
        )
    return apportion(places, class_sizes, 1, most)


def _draw_held(
    num_holders: np.ndarray, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw which classes each client holds, ``(N, C)``, C different ones each.

    The places of one class after the other are dealt out to the clients in turn. This never gives a client the same
    class twice, because a class has at most N places. Then random pairs of clients swap one class each, unless one of
    them already has the class that it would get.
    """
    classes = rng.permutation(len(num_holders))
    held = np.repeat(classes, num_holders[classes]).reshape(classes_per_client, num_clients).T
    held = held[rng.permutation(num_clients)]
    for _ in range(SWAPS_PER_CLASS * classes_per_client if classes_per_client > 1 else 0):
        pairs = rng.permutation(num_clients)[: num_clients // 2 * 2].reshape(2, -1)
        places = rng.integers(classes_per_client, size=pairs.shape)
        given, taken = held[pairs, places]
        fits = (held[pairs[1]] != given[:, None]).all(axis=1) & (held[pairs[0]] != taken[:, None]).all(axis=1)
        held[pairs[0, fits], places[0, fits]] = taken[fits]
        held[pairs[1, fits], places[1, fits]] = given[fits]
    return held
