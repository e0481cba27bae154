"""Synthetic(alpha, beta) and the synthetic regression: their formulas, and the draws of the public code."""

import random

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import SyntheticDataModule, SyntheticRegressionDataModule
from helpers.data_formats import ready
from helpers.traced import traced_peak

from fedbc_lightning.core.errors import ConfigurationError


def draw_synthetic(seed, sizes, *arguments):
    """Draw with alpha, beta, iid, dimension and num_classes."""
    alpha, beta, *others = arguments
    return SyntheticDataModule(alpha, beta, len(sizes), *others).draw(np.random.default_rng(seed), np.array(sizes))


def test_synthetic_shapes_and_sizes():
    data = ready(SyntheticDataModule(seed=0))
    sizes = data.num_samples("train") + data.num_samples("test")
    assert sizes.min() >= 50
    logs = np.log(ready(SyntheticDataModule(num_clients=400, dimension=2, seed=0)).parts.sizes - 50 + 0.5)
    assert np.median(logs) == pytest.approx(4, abs=0.3)
    assert np.subtract(*np.percentile(logs, [84, 16])) / 2 == pytest.approx(2, rel=0.15)
    inputs, targets = next(iter(data.client_train_dataloader(0)))
    assert inputs.shape == (32, 60)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)


def test_many_models_are_never_held_in_float64():
    assert traced_peak(lambda: draw_synthetic(0, np.zeros(2000, int), 0.5, 0.5)) < 1.9 * 2000 * 61 * 10 * 4


def test_synthetic_labels_and_inputs_follow_a_plain_loop():
    """The formulas of DATA.md written sample by sample over the same draws."""
    sizes, dim, classes, alpha, beta = np.array([5, 8, 3]), 4, 3, 0.7, 1.3
    inputs, labels = draw_synthetic(5, sizes, alpha, beta, False, dim, classes)
    rng = np.random.default_rng(5)
    u = [rng.normal(0, alpha) for _ in sizes]
    b_mean = [rng.normal(0, beta) for _ in sizes]
    models = [[[rng.standard_normal() for _ in range(classes)] for _ in range(dim + 1)] for _ in sizes]
    v_noise = [[rng.standard_normal() for _ in range(dim)] for _ in sizes]
    noise = rng.standard_normal((sizes.sum(), dim), dtype=np.float32)
    row = 0
    for k, size in enumerate(sizes):
        weight = np.array(models[k][:dim]) + u[k]
        bias = np.array(models[k][dim]) + u[k]
        for _ in range(size):
            x = [b_mean[k] + v_noise[k][j] + noise[row, j] * (j + 1) ** (-1.2 / 2) for j in range(dim)]
            assert inputs[row] == pytest.approx(np.array(x), abs=1e-5)
            logits = weight.T @ np.array(x) + bias
            assert labels[row] == logits.argmax()
            row += 1


def test_synthetic_alpha_moves_nothing_but_models_and_rounds_no_label():
    one, labels = draw_synthetic(0, np.array([300, 300]), 0.0, 10.0)
    other, moved = draw_synthetic(0, np.array([300, 300]), 1e6, 10.0)
    assert np.array_equal(one, other)
    assert np.array_equal(labels, moved)  # u_i shifts all logits of a sample alike: argmax(Wx + b) does not see it


def test_synthetic_iid_variant():
    """One model for all clients, and means of the inputs that are one number per client."""
    inputs, labels = draw_synthetic(0, np.full(4, 3000), 0.5, 3.0, True, 10, 5)
    rng = np.random.default_rng(0)
    rng.normal(0, 0.5, 4), rng.normal(0, 3.0, 4)
    model = rng.standard_normal((11, 5))
    assert np.mean((inputs @ model[:10] + model[10]).argmax(axis=1) == labels) > 0.9999
    centres = inputs.reshape(4, 3000, 10).mean(axis=1)
    assert np.ptp(centres, axis=1).max() < 0.1
    assert np.ptp(centres[:, 0]) > 1


# the synthetic regression of Fed+


def test_formulas_of_the_regression():
    """Many samples of a few clients: least squares gives w and the noise, moments give the mean and variances of x."""
    inputs, targets = SyntheticRegressionDataModule(6, 15_000, 100).draw(np.random.default_rng(0))
    assert (inputs.dtype, targets.dtype) == (np.float32, np.float32)
    variances = np.array([1.0 if j % 50 == 0 else (j % 50) ** -1.1 for j in range(1, 101)])
    assert inputs.var(axis=1).mean(axis=0) == pytest.approx(variances, rel=0.05)
    means = inputs.mean(axis=1).astype(np.float64)
    assert means.var() == pytest.approx(0.5, rel=0.15)
    models, noise = [], []
    for x, y in zip(inputs.astype(np.float64), targets.astype(np.float64), strict=True):
        model, (rest,), *_ = np.linalg.lstsq(x, y, rcond=None)
        models.append(model)
        noise.append(rest / len(y))
    assert noise == pytest.approx([2.0] * 6, rel=0.05)
    center = np.median(models[:-1], axis=0)
    assert center.var() == pytest.approx(5.0, rel=0.35)
    assert np.var(models[-1]) == pytest.approx(50.0, rel=0.35)
    spread = np.std([model - center for model in models[:-1]])
    assert spread == pytest.approx(0.5 * np.sqrt(2), rel=0.3)  # Laplace(b): b sqrt(2)
    assert np.abs(models[-1] - center).mean() > 3 * np.abs(models[0] - center).mean()


def test_defaults_of_the_regression():
    data = ready(SyntheticRegressionDataModule(seed=0))
    assert (data.num_clients, data.label_histogram()) == (10, None)
    assert data.num_samples("train").tolist() == data.num_samples("test").tolist() == [50] * 10
    inputs, targets = next(iter(data.client_train_dataloader(0)))
    assert (inputs.shape, inputs.dtype) == ((10, 1000), torch.float32)
    assert (targets.shape, targets.dtype) == ((10,), torch.float32)


# the public code's draws, against a script written from their description

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
            left, right = np.stack([x.numpy() for x, _ in found]), np.stack([x for x, _ in pairs])
            assert np.array_equal(left, right.astype(np.float32))
    assert random.getstate() == states[0]  # the draws leave the global generators alone


def test_an_iid_variant_of_the_public_draws_and_other_seeds_are_refused():
    with pytest.raises(ConfigurationError, match=r"data\.iid: the public draws have no IID variant"):
        SyntheticDataModule(style="public", iid=True)
    with pytest.raises(ConfigurationError, match=r"data\.seed=-1: the public draws take a seed from 0 to 4294967295"):
        SyntheticDataModule(style="public", seed=-1).setup()
