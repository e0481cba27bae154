"""The sizes of the paper's Table 5, how its clients are filled, and the other rules of sizes."""

from fractions import Fraction

import numpy as np
import pytest

from fedbc_lightning.partition import IID, ExponentialSizes, LinearSizes, LogNormalSizes, PowerLaw, power_law_sizes
from fedbc_lightning.partition.dealing import apportion

CIFAR10 = np.arange(60_000) % 10
MNIST = np.repeat(np.arange(10), [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])
TABLE_5 = [  # labels, exponent, smallest, largest client of 20
    (CIFAR10, 1.1, 1047, 6433),
    (CIFAR10, 1.2, 320, 10398),
    (CIFAR10, 1.3, 94, 14032),
    (CIFAR10, 1.4, 28, 17814),
    (CIFAR10, 1.5, 9, 20067),
    (MNIST, 1.1, 1222, 7486),
    (MNIST, 1.2, 374, 12057),
    (MNIST, 1.3, 110, 16444),
    (MNIST, 1.4, 32, 21197),
    (MNIST, 1.5, 10, 23410),
]


def classes_per_client(labels, parts):
    return [len(np.unique(labels[part])) for part in parts]


# Power law


@pytest.mark.parametrize(("labels", "exponent", "smallest", "largest"), TABLE_5)
def test_one_class_per_client_has_the_sizes_of_table_5_and_fills_n_plus_nine_parts(labels, exponent, smallest, largest):
    sizes = power_law_sizes(len(labels), 20, exponent)
    assert (sizes.min(), sizes.max(), sizes.sum()) == (smallest, largest, len(labels))
    assert (np.diff(sizes) >= 0).all()
    for seed in range(3):
        parts = PowerLaw(20, 1, exponent)(labels, seed)
        assert parts.sizes.tolist() == sizes.tolist()
        assert sum(classes_per_client(labels, parts)) == 20 + 9


@pytest.mark.parametrize("num_classes", [2, 3])
def test_small_clients_have_exactly_the_classes_asked_for(num_classes):
    parts = PowerLaw(20, num_classes, 1.2)(CIFAR10, seed=0)
    assert classes_per_client(CIFAR10, parts)[:15] == [num_classes] * 15
    counts = np.bincount(CIFAR10[parts[0]])
    assert counts.max() == -(-len(parts[0]) // num_classes)


def test_power_law_fills_as_a_plain_loop_over_the_words_of_the_paper():
    """Client by client, class by class, with the same class orders; which of a class's samples is left to chance."""
    labels, num_clients, per_client, exponent = np.arange(3000) % 6, 9, 3, 1.25
    rng = np.random.default_rng(4)
    order = rng.permutation(len(labels))
    stacks = {label: [i for i in order if labels[i] == label] for label in range(6)}
    sizes = power_law_sizes(len(labels), num_clients, exponent)
    clients = [[] for _ in sizes]
    for client, class_order in enumerate([rng.permutation(6) for _ in sizes]):
        for label in class_order:
            room = min(-(-sizes[client] // per_client), sizes[client] - len(clients[client]))
            clients[client] += stacks[label][:room]
            del stacks[label][:room]
    for label in range(6):
        for client in reversed(range(num_clients)):
            share = int(np.ceil(len(stacks[label]) / exponent))
            clients[client] += stacks[label][:share]
            del stacks[label][:share]
    assert not any(stacks.values())
    parts = PowerLaw(num_clients, per_client, exponent)(labels, 4)
    assert [labels[part].tolist() for part in parts] == [labels[client].tolist() for client in clients]


# Sizes


def plain_shares(total, weights, least):
    """Largest remainder in exact fractions, those below ``least`` raised to it, until nobody is below."""
    low = set()
    while True:
        rest = total - least * len(low)
        free = [k for k in range(len(weights)) if k not in low]
        weight = sum(weights[k] for k in free)
        shares = {k: Fraction(rest * weights[k], weight) for k in free}
        below = {k for k in free if shares[k] < least}
        if not below:
            break
        low |= below
    given = [least if k in low else int(shares[k]) for k in range(len(weights))]
    by_remainder = sorted(free, key=lambda k: (int(shares[k]) - shares[k], k))
    for k in by_remainder[: total - sum(given)]:
        given[k] += 1
    return given


@pytest.mark.parametrize("seed", range(60))
def test_apportion_is_the_largest_remainder_in_exact_fractions(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, rng.choice([3, 50, 5000]), rng.integers(1, 30))
    least = int(rng.integers(1, 4))
    total = least * len(weights) + int(rng.integers(0, 2000))
    assert apportion(total, weights, least).tolist() == plain_shares(total, weights.tolist(), least)


@pytest.mark.parametrize("seed", range(40))
def test_apportion_between_bounds(seed):
    rng = np.random.default_rng(seed)
    weights = rng.lognormal(0, 2, 12)
    most = rng.integers(1, 40, 12)
    total = int(rng.integers(12, most.sum() + 1))
    given = apportion(total, weights, 1, most)
    assert given.sum() == total
    assert (given >= 1).all()
    assert (given <= most).all()
    inside = (given > 1) & (given < most)
    lowest, highest = (given - 1) / weights, (given + 1) / weights  # of the factor t, if shares are within 1 of t * w
    assert lowest[inside].max(initial=0) < highest[inside].min(initial=np.inf)
    assert apportion(int(most.sum()), weights, 1, most).tolist() == most.tolist()


def test_sizes_without_classes_are_as_asked():
    nothing = np.zeros(1000, dtype=int)
    assert sorted(set(IID(7)(nothing, 0).sizes.tolist())) == [142, 143]
    assert LinearSizes(30)(nothing, 0).sizes.tolist() == plain_shares(1000, list(range(1, 31)), 1)
    assert ExponentialSizes(12, 2.0)(nothing, 0).sizes.tolist() == plain_shares(1000, [2**k for k in range(12)], 1)
    assert LogNormalSizes(30, 0.0, 5)(nothing, 0).sizes.tolist() == IID(30)(nothing, 0).sizes.tolist()


def test_log_normal_sizes_have_the_spread_asked_for():
    sizes = LogNormalSizes(2000, 1.5)(np.zeros(1_000_000, dtype=int), seed=0).sizes
    assert np.log(sizes).std() == pytest.approx(1.5, rel=0.05)
    assert LogNormalSizes(50, 2.0, min_samples=7)(np.zeros(1000, dtype=int), seed=0).sizes.min() == 7


@pytest.mark.parametrize("partitioner", [LogNormalSizes(5, 1.0), LinearSizes(5), ExponentialSizes(5, 1.5), IID(5)])
def test_sizes_have_all_classes_alike(partitioner):
    for part in partitioner(CIFAR10, seed=0):
        assert np.bincount(CIFAR10[part], minlength=10) / len(part) == pytest.approx(0.1, abs=0.04)
