"""The synthetic data of the FedBC authors' public code, against a script written from the description of its draws."""

import random

import numpy as np
import pytest
from fedbc_lightning.datamodules import SyntheticDataModule

from fedbc_lightning.core.errors import ConfigurationError

NUM_CLIENTS, DIMENSION, NUM_CLASSES = 30, 60, 10


def by_the_description(seed, alpha, beta):
    """Each client's training and test pairs (input, label)."""
    np.random.seed(seed)
    random.seed(seed)
    sizes = np.random.lognormal(4, 2, NUM_CLIENTS).astype(int) + 50
    u = np.random.normal(0, alpha, NUM_CLIENTS)
    centre = np.random.normal(0, beta, NUM_CLIENTS)
    v = np.stack([np.random.normal(centre[k], 1, DIMENSION) for k in range(NUM_CLIENTS)])
    variance = np.array([j**-1.2 for j in range(1, DIMENSION + 1)])
    clients = []
    for k in range(NUM_CLIENTS):
        weight = np.random.normal(u[k], 1, (DIMENSION, NUM_CLASSES))
        bias = np.random.normal(u[k], 1, NUM_CLASSES)
        x = np.random.multivariate_normal(v[k], np.diag(variance), sizes[k])
        clients.append([(row, int(np.argmax(row @ weight + bias))) for row in x])
    for pairs in clients:
        random.shuffle(pairs)
    return [(pairs[: int(0.8 * len(pairs))], pairs[int(0.8 * len(pairs)) :]) for pairs in clients]


@pytest.mark.parametrize("seed", [1, 7])
def test_the_public_draws_are_those_of_their_description(seed):
    states = random.getstate(), np.random.get_state()
    expected = by_the_description(seed, 0.5, 0.5)
    random.setstate(states[0]), np.random.set_state(states[1])
    data = SyntheticDataModule(style="public", split_order="ordered", seed=seed)
    data.setup()
    for client, (train, test) in enumerate(expected):
        for split, pairs in (("train", train), ("test", test)):
            found = [data.client_dataset(client, split)[k] for k in range(data.num_samples(split)[client])]
            assert [label.item() for _, label in found] == [label for _, label in pairs]
            assert np.array_equal(
                np.stack([x.numpy() for x, _ in found]), np.stack([x for x, _ in pairs]).astype(np.float32)
            )
    assert random.getstate() == states[0]  # the draws leave the global generators alone


def test_other_styles_an_iid_variant_and_other_seeds_are_refused():
    with pytest.raises(ConfigurationError, match=r"data\.style: got 'mine'; give own or public"):
        SyntheticDataModule(style="mine")
    with pytest.raises(ConfigurationError, match=r"data\.iid: the public draws have no IID variant"):
        SyntheticDataModule(style="public", iid=True)
    with pytest.raises(ConfigurationError, match=r"data\.seed=-1: the public draws take a seed from 0 to 4294967295"):
        SyntheticDataModule(style="public", seed=-1).setup()
