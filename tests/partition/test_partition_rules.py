"""Partitioners that go by class against plain loops over their rules and against their distributions."""

from collections import Counter
from dataclasses import make_dataclass

import numpy as np
import pytest

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition import ClassesPerClient, Dirichlet, InnerDirichlet, Natural, Shards
from fedbc_lightning.partition.few_classes import count_holders

CIFAR10 = np.arange(60_000) % 10
MNIST_COUNTS = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]


def test_a_dataclass_of_the_users_is_checked():
    own = make_dataclass("Own", [("more", int, 0)], bases=(Dirichlet,))
    with pytest.raises(ConfigurationError, match=r"data\.partitioner\.num_clients: got 0"):
        own(0)


# Shares drawn from a Dirichlet distribution


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    labels, alpha, num_clients = np.zeros(10_000, dtype=int), 2.0, 4
    sizes = np.array([Dirichlet(num_clients, alpha, 1)(labels, seed).sizes for seed in range(400)]) / 10_000
    assert sizes.mean(axis=0) == pytest.approx(0.25, abs=0.03)
    variance = 0.25 * 0.75 / (num_clients * alpha + 1)
    assert sizes.var() == pytest.approx(variance, rel=0.15)
    assert Dirichlet(50, 0.2, min_samples=60)(np.arange(60_000) % 10, 0).sizes.min() >= 60


@pytest.mark.parametrize("alpha", [0.02, 0.3, 5.0])
def test_inner_dirichlet_is_a_plain_loop_over_its_words(alpha):
    """Turn by turn, place by place, with the same random numbers."""
    labels, sizes, seed = np.repeat(np.arange(4), [40, 30, 20, 110]), [5, 60, 100, 1, 34], 11
    rng = np.random.default_rng(seed)
    order = rng.permutation(200)
    stacks = [[i for i in order if labels[i] == label] for label in range(4)]
    shares = np.random.default_rng([int(rng.integers(2**63)), 0]).dirichlet([alpha] * 4, 5)
    holders = [[] for _ in range(4)]
    left = [40, 30, 20, 110]
    places = [client for client, size in enumerate(sizes) for _ in range(size)]
    free = list(range(200))
    held = {}
    while free:
        numbers = rng.random(len(free)) * (1 - 1e-9)
        asked = {label: [] for label in range(4)}
        for place, number in zip(free, numbers, strict=True):
            own = [share if rest else 0 for share, rest in zip(shares[places[place]], left, strict=True)]
            own = own if sum(own) else [float(rest > 0) for rest in left]
            asked[int(np.searchsorted(np.cumsum(own) / sum(own), number, side="right"))].append(place)
        lots = {free[position]: lot for lot, position in enumerate(rng.permutation(len(free)))}
        for label, wanting in asked.items():
            served = sorted(wanting, key=lots.__getitem__)[: left[label]]
            held |= dict.fromkeys(served, label)
            left[label] -= len(served)
        free = [place for place in free if place not in held]
    for place, client in enumerate(places):
        holders[held[place]].append(client)
    clients = [[] for _ in sizes]
    for stack, owners in zip(stacks, holders, strict=True):
        for sample, client in zip(stack, owners, strict=True):
            clients[client].append(int(sample))
    parts = InnerDirichlet(5, alpha, sizes=sizes)(labels, seed)
    assert [part.tolist() for part in parts] == clients


# Few classes per client


@pytest.mark.parametrize(("num_clients", "shards_per_client"), [(7, 1), (7, 2), (13, 5), (100, 2)])
def test_shards_are_the_pieces_of_the_sorted_samples(num_clients, shards_per_client):
    labels = np.random.default_rng(1).integers(0, 6, 1000)
    num_shards = num_clients * shards_per_client
    pieces = Counter(tuple(piece) for piece in np.array_split(np.sort(labels), num_shards))
    sizes = {len(piece) for piece in pieces}
    parts = Shards(num_clients, shards_per_client)(labels, 0)
    assert sum(pieces.values()) == num_shards
    assert all(min(sizes) * shards_per_client <= size <= max(sizes) * shards_per_client for size in parts.sizes)
    if shards_per_client == 1:
        assert Counter(tuple(labels[part]) for part in parts) == pieces
    if 1000 % num_shards == 0:
        dealt = Counter(tuple(piece) for part in parts for piece in np.split(labels[part], shards_per_client))
        assert dealt == pieces


@pytest.mark.parametrize(
    ("counts", "num_clients", "num_classes"),
    [
        (MNIST_COUNTS, 1000, 1),
        (MNIST_COUNTS, 1000, 10),
        ([2400] * 10, 200, 5),
        ([10, 1000, 3, 50, 1], 5, 2),
        ([10, 1000, 3, 50, 1], 2, 3),
        ([900, 50, 50], 30, 2),
        ([5, 5], 1, 2),
    ],
)
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_classes_per_client(counts, num_clients, num_classes, spread):
    labels = np.repeat(np.arange(len(counts)), counts)
    parts = ClassesPerClient(num_clients, num_classes, spread)(labels, 3)
    table = np.array([np.bincount(labels[part], minlength=len(counts)) for part in parts])
    assert ((table > 0).sum(axis=1) == num_classes).all()
    holders = (table > 0).sum(axis=0)
    assert holders.tolist() == count_holders(np.array(counts), num_clients, num_classes).tolist()
    exact = np.array(counts) * num_clients * num_classes / sum(counts)
    if ((exact >= 1) & (exact <= np.minimum(counts, num_clients))).all():
        assert (np.abs(holders - exact) < 1).all()
    if not spread:
        assert all(np.ptp(column[column > 0]) <= 1 for column in table.T)


# Natural clients


def test_natural_clients_are_a_plain_loop():
    clients = np.random.default_rng(2).integers(0, 40, 300)
    members = {client: [i for i in range(300) if clients[i] == client] for client in range(40)}
    assert [part.tolist() for part in Natural()(clients, 0)] == list(members.values())
    large = [part for part in members.values() if len(part) >= 8]
    assert 3 < len(large) < 40
    assert [part.tolist() for part in Natural(min_samples=8)(clients, 0)] == large
    some = [part.tolist() for part in Natural(3, min_samples=8)(clients, 0)]
    assert [part for part in large if part in some] == some
    drawn = {tuple(map(tuple, (part.tolist() for part in Natural(3, 8)(clients, seed)))) for seed in range(5)}
    assert len(drawn) > 1
