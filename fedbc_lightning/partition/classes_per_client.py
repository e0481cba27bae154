"""Exactly C classes per client."""

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
    """Every client has samples of exactly C classes.

    Each class gets holders in proportion to its number of samples, from 1 to N of them, and is shared out over its
    holders equally, or unequally by ``size_spread``. Fed+ uses ``(200, 5)`` on FEMNIST, and on MNIST 1,000 clients of
    one digit each with "power-law" sizes, in FedProx's public code log-normal ones: ``(1000, 1, size_spread=2.0)``.

    Args:
        num_clients: Number of clients N; N * C must be at least the number of classes.
        classes_per_client: C, from 1 to the number of classes.
        size_spread: 0: a class's holders get equal parts (by at most one sample); above, up to 10: parts in proportion
            to exp(size_spread * z), z ~ N(0, 1) for each holder of each class, at least one sample.

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
        """See :func:`split_classes`."""
        rng = np.random.default_rng(seed)
        return split_classes(values, self.num_clients, self.classes_per_client, self.size_spread, rng)


def split_classes(
    labels: np.ndarray, num_clients: int, classes_per_client: int, size_spread: float, rng: np.random.Generator
) -> Partition:
    """Choose each class's holders, then share it out over them.

    Args:
        labels: Class of each sample, integers ``(M,)``.
        num_clients: N.
        classes_per_client: C.
        size_spread: Sigma of the log-normal parts of a class; 0: equal parts.
        rng: Order of samples, who holds what, and who gets how much.

    Returns:
        The clients' samples, class by class.

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
    """How many clients hold each class: N * C in all, in proportion to the classes' sizes, from 1 to N each.

    A class never has more holders than samples. Rounded by largest remainder.

    Args:
        class_sizes: Samples of each class, ``(num_classes,)``.
        num_clients: N.
        classes_per_client: C.

    Raises:
        ConfigurationError: There are too many or too few places for that.

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
    """Which classes each client holds, ``(N, C)``, all different: dealt out in turn, then swapped at random.

    Dealing out a class's places one after the other in turn never gives a client the same class twice, for a class
    has at most N of them. Two clients swap one class each where neither has the other's already.
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
