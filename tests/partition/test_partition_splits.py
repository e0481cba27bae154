"""Train and test parts inside every client, for one client and for all at once."""

import numpy as np
import pytest

from fedbc_lightning.data.splits import split_partition
from fedbc_lightning.partition import Dirichlet, Partition

CIFAR10 = np.arange(60_000) % 10


def one(size):
    """A single client."""
    return Partition.from_parts([np.arange(size)])


def possible_draws(counts, fraction):
    """The rule in plain words, for one client: one draw per class that may give or keep the odd sample."""
    wanted = [0 if count == 1 else int(np.floor(fraction * count + 0.5)) for count in counts]
    change = 0 if sum(counts) < 2 else int(not any(wanted)) - int(sum(wanted) == sum(counts))
    if not change:
        return [[0] * len(counts) if sum(counts) < 2 else wanted]
    largest = [k for k, count in enumerate(counts) if count == max(counts)]
    return [[number + change * (k == chosen) for k, number in enumerate(wanted)] for chosen in largest]


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("order", ["shuffled", "ordered"])
def test_all_clients_at_once_as_one_after_the_other(fraction, labelled, order):
    """300 clients of 0 to some 30 samples, and samples that nobody has."""
    rng = np.random.default_rng(5)
    labels = rng.integers(-2, 6, 3000)
    owners = np.minimum(rng.geometric(0.008, 3000), 299) - 1
    parts = Partition.from_owners(owners, 300, rng.permutation(3000))
    train, test = split_partition(parts, labels if labelled else None, fraction, order, rng)
    assert len(train) == len(test) == 300
    for part, first, second in zip(parts, train, test, strict=True):
        if order == "ordered":
            number = int((1 - fraction) * len(part) + 1e-9)
            number = len(part) if len(part) < 2 else min(max(number, 1), len(part) - 1)
            assert (first.tolist(), second.tolist()) == (part[:number].tolist(), part[number:].tolist())
            continue
        is_second = np.isin(part, second)
        assert (part[~is_second].tolist(), part[is_second].tolist()) == (first.tolist(), second.tolist())
        classes = np.unique(labels[part]) if labelled else [0]
        known = labels[part] if labelled else np.zeros(len(part))
        counts = [int((known == label).sum()) for label in classes]
        if len(part):
            drawn = [int((known[is_second] == label).sum()) for label in classes]
            assert drawn in possible_draws(counts, fraction)


def test_split_is_seeded_and_leaves_every_sample_a_chance():
    parts = Dirichlet(20, 0.5, 5)(CIFAR10, 0)
    first = split_partition(parts, CIFAR10, 0.2, "shuffled", np.random.default_rng(0))[1]
    again = split_partition(parts, CIFAR10, 0.2, "shuffled", np.random.default_rng(0))[1]
    other = split_partition(parts, CIFAR10, 0.2, "shuffled", np.random.default_rng(1))[1]
    assert first.hash() == again.hash() != other.hash()
    times = np.zeros(40)
    for seed in range(500):
        times[
            split_partition(one(40), np.arange(40) % 4, 0.25, "shuffled", np.random.default_rng(seed))[1].indices
        ] += 1
    assert times / 500 == pytest.approx(0.25 + 0.05, abs=0.08)  # round(2.5) = 3 of each 10


def test_clients_of_few_samples_test_all_classes_alike():
    """With the first of the tied classes always, class 0 was a fifth of the test data and class 9 nearly none."""
    labels = np.random.default_rng(0).integers(0, 10, 40_000)
    parts = Partition.from_sizes(np.arange(40_000), np.full(20_000, 2))
    for fraction in (0.2, 0.9):
        train, test = split_partition(parts, labels, fraction, "shuffled", np.random.default_rng(1))
        assert np.bincount(labels[test.indices]) / 20_000 == pytest.approx(0.1, abs=0.01)
        assert np.bincount(labels[train.indices]) / 20_000 == pytest.approx(0.1, abs=0.01)
