"""The draws of the FedBC authors' public code, and the partitions of the paper's Table 4 that they give."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from fedbc_lightning.data.splits import split_partition
from fedbc_lightning.papers.partition_tables import CLASS_SIZES, EXPONENTS, TABLE_4, classes_held
from fedbc_lightning.partition import PowerLaw


def by_the_description(labels, num_clients, per_client, exponent, seed):
    """Each client's samples by plain lists, as the public code's procedure is described."""
    unit = len(labels) // sum(exponent**k for k in range(1, num_clients + 1))
    sizes = [math.floor(exponent**k * unit) for k in range(1, num_clients + 1)]
    rest, client = len(labels) - sum(sizes), num_clients - 1
    while rest:
        more = math.ceil(rest / exponent)
        sizes[client], rest, client = sizes[client] + more, rest - more, client - 1
    stacks = {label: [i for i, found in enumerate(labels) if found == label] for label in sorted(set(labels))}
    draw, order = random.Random(seed), sorted(stacks)
    clients = [[] for _ in sizes]
    for held, size in zip(clients, sizes, strict=True):
        draw.shuffle(order)
        for label in order:
            number = min(size - len(held), math.ceil(size / per_client), len(stacks[label]))
            held += stacks[label][:number]
            stacks[label] = stacks[label][number:]
    for label in order:
        for held in reversed(clients):
            number = math.ceil(len(stacks[label]) / exponent)
            held += stacks[label][:number]
            stacks[label] = stacks[label][number:]
    return clients


@pytest.mark.parametrize(("per_client", "exponent", "seed"), [(1, 1.2, 1), (2, 1.1, 1), (3, 1.1, 5), (4, 1.4, 2)])
def test_the_public_draws_are_those_of_their_description(per_client, exponent, seed):
    labels = np.random.default_rng(0).choice(10, 6000, p=np.arange(1, 11) / 55)
    expected = by_the_description(labels.tolist(), 20, per_client, exponent, seed)
    parts = PowerLaw(20, per_client, exponent, style="public", seed=seed)(labels, seed=99)
    assert [part.tolist() for part in parts] == expected


LABELS = {name: np.repeat(np.arange(10), sizes) for name, sizes in CLASS_SIZES.items()}
CELLS = {(*row, e): cell for row, cells in TABLE_4.items() for e, cell in zip(EXPONENTS, cells, strict=True)}


def test_seed_1_gives_27_of_the_30_cells_of_table_4_and_no_other_seed_comes_near():
    """docs/results.md says that the best of the seeds 0 and 2 to 59 has 12 of the 30; a few of them are tried here."""
    differing = [(name, c, e) for (name, c, e), cell in CELLS.items() if classes_held(LABELS[name], c, e) != cell]
    assert len(CELLS) == 30
    assert differing == [("CIFAR-10", 1, 1.2), ("CIFAR-10", 1, 1.3), ("CIFAR-10", 3, 1.1)]
    for seed in (0, *range(2, 8)):
        assert sum(classes_held(LABELS[name], c, e, seed) == cell for (name, c, e), cell in CELLS.items()) <= 12


@pytest.mark.parametrize(("exponent", "fewest"), [(1.1, 2), (1.2, 2), (1.3, 2), (1.4, 1), (1.5, 1)])
def test_every_digit_of_mnist_has_two_holders_at_least_if_sizes_grow_slowly(exponent, fewest):
    """docs/results.md says so of exponents up to 1.3, and that one client holds all of the digit 2 beyond."""
    labels = LABELS["MNIST"]
    parts = PowerLaw(20, 1, exponent, style="public", seed=1)(labels, seed=0)
    holders = Counter(label for part in parts for label in np.unique(labels[part]).tolist())
    assert min(holders.values()) == fewest
    assert [label for label, number in holders.items() if number == 1] == [2] * (2 - fewest)


def test_the_ordered_split_cuts_each_client_at_80_percent_of_what_it_was_filled_with():
    labels = np.arange(6000) % 10
    parts = PowerLaw(20, 2, 1.2, style="public", seed=1)(labels, seed=0)
    train, test = split_partition(parts, labels, 0.2, "ordered", np.random.default_rng(0))
    for part, kept, cut in zip(parts, train, test, strict=True):
        assert part.tolist() == kept.tolist() + cut.tolist()
        assert len(kept) == int(0.8 * len(part))


def test_a_seed_of_its_own_fixes_the_draws_of_either_style():
    labels = np.arange(600) % 10
    for style in ("own", "public"):
        fixed = PowerLaw(5, style=style, seed=3)
        assert [part.tolist() for part in fixed(labels, 0)] == [part.tolist() for part in fixed(labels, 1)]
        free = PowerLaw(5, style=style)
        assert [part.tolist() for part in free(labels, 0)] != [part.tolist() for part in free(labels, 1)]
        assert [part.tolist() for part in free(labels, 3)] == [part.tolist() for part in fixed(labels, 0)]
