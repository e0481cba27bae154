"""The FedBC paper's partition: the sizes of its Table 5, how clients are filled, and the draws of its public code."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from fedbc_lightning.papers.partition_tables import CLASS_SIZES, EXPONENTS, TABLE_4, classes_held
from fedbc_lightning.partition import PowerLaw, power_law_sizes

CIFAR10 = np.arange(60_000) % 10
MNIST = np.repeat(np.arange(10), [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])
TABLE_5 = [  # labels, exponent, smallest, largest client of 20
    (CIFAR10, 1.1, 1047, 6433), (CIFAR10, 1.2, 320, 10398), (CIFAR10, 1.3, 94, 14032), (CIFAR10, 1.4, 28, 17814),
    (CIFAR10, 1.5, 9, 20067), (MNIST, 1.1, 1222, 7486), (MNIST, 1.2, 374, 12057), (MNIST, 1.3, 110, 16444),
    (MNIST, 1.4, 32, 21197), (MNIST, 1.5, 10, 23410),
]  # fmt: skip


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


# the public code's draws


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


def test_a_seed_of_its_own_fixes_the_draws_of_either_style():
    labels = np.arange(600) % 10
    for style in ("own", "public"):
        fixed = PowerLaw(5, style=style, seed=3)
        assert [part.tolist() for part in fixed(labels, 0)] == [part.tolist() for part in fixed(labels, 1)]
        free = PowerLaw(5, style=style)
        assert [part.tolist() for part in free(labels, 0)] != [part.tolist() for part in free(labels, 1)]
        assert [part.tolist() for part in free(labels, 3)] == [part.tolist() for part in fixed(labels, 0)]
