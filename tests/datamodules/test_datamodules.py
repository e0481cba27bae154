"""The ready data: formats, normalisation, formulas, memory, and clear words about missing or broken files."""

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import DigitsDataModule, SyntheticDataModule
from fedbc_lightning.datamodules.synthetic import draw_synthetic

from fedbc_lightning.core import seeding
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition import PowerLaw


def ready(data):
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    data.validate_clients()
    return data


def total(data):
    return sum(int(data.num_samples(split).sum()) for split in ("train", "val", "test"))


def test_digits():
    data = ready(DigitsDataModule(seed=0))
    assert (data.num_clients, total(data)) == (10, 1797)
    inputs, targets = next(iter(data.client_train_dataloader(3)))
    assert inputs.shape == (32, 1, 8, 8)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert data.source.pool.tensors[0].dtype == torch.uint8
    assert ready(DigitsDataModule(seed=0)).partition_hash() == data.partition_hash()
    assert ready(DigitsDataModule(seed=1)).partition_hash() != data.partition_hash()


def test_setup_loads_once():
    data = ready(DigitsDataModule())
    source = data.source
    data.setup("validate")
    assert data.source is source


def test_ordered_split_is_that_of_the_public_code():
    data = ready(DigitsDataModule(PowerLaw(5, 2, 1.1), split_order="ordered"))
    for client in range(3):
        train, test = data.client_dataset(client, "train"), data.client_dataset(client, "test")
        assert len({int(digit) for _, digit in test}) == 1
        assert len(train) == int(0.8 * (len(train) + len(test)) + 1e-9)


@pytest.mark.parametrize(
    "arguments", [{"test_fraction": 0.0}, {"test_fraction": 1.2}, {"split_order": "random"}, {"batch_size": 0}]
)
def test_impossible_arguments(arguments):
    with pytest.raises(ConfigurationError):
        DigitsDataModule(**arguments)


# synthetic


def test_synthetic_shapes_and_sizes():
    data = ready(SyntheticDataModule(seed=0))
    sizes = data.num_samples("train") + data.num_samples("test")
    assert data.num_clients == 30
    assert sizes.min() >= 50
    assert len(set(sizes.tolist())) > 20
    inputs, targets = next(iter(data.client_train_dataloader(0)))
    assert inputs.shape == (32, 60)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert data.num_samples("test").sum() / sizes.sum() == pytest.approx(0.2, abs=0.01)
    same, other = ready(SyntheticDataModule(seed=0)), ready(SyntheticDataModule(seed=1))
    assert torch.equal(same.source.pool.tensors[0], data.source.pool.tensors[0])
    assert other.partition_hash() != data.partition_hash()


def test_synthetic_sizes_are_log_normal():
    data = SyntheticDataModule(num_clients=400, dimension=2, seed=0)
    data.setup()
    logs = np.log(data.num_samples("train") + data.num_samples("test") - 50 + 0.5)
    assert np.median(logs) == pytest.approx(4, abs=0.3)
    assert np.subtract(*np.percentile(logs, [84, 16])) / 2 == pytest.approx(2, rel=0.15)


def test_synthetic_labels_and_inputs_follow_a_plain_loop():
    """The formulas of DATA.md written sample by sample over the same draws."""
    sizes, dim, classes, alpha, beta = np.array([5, 8, 3]), 4, 3, 0.7, 1.3
    inputs, labels = draw_synthetic(np.random.default_rng(5), sizes, alpha, beta, False, dim, classes)
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
            softmax = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            assert labels[row] == softmax.argmax()
            row += 1


def test_synthetic_moments():
    """Many clients: x of client i has mean v_i ~ N(B_i, 1), B_i ~ N(0, beta), and variances j^-1.2."""
    sizes, beta, dim = np.full(600, 60), 2.0, 20
    inputs, _ = draw_synthetic(np.random.default_rng(0), sizes, 0.5, beta, False, dim, 2)
    blocks = inputs.reshape(600, 60, dim).astype(np.float64)
    assert blocks.var(axis=1, ddof=1).mean(axis=0) == pytest.approx(np.arange(1, dim + 1) ** -1.2, rel=0.05)
    means = blocks.mean(axis=1)
    assert means.mean(axis=1).std() == pytest.approx(np.sqrt(beta**2 + 1 / dim), rel=0.1)
    assert (means - means.mean(axis=1, keepdims=True)).var() == pytest.approx(1.0, rel=0.1)


def test_synthetic_alpha_moves_nothing_but_models():
    one, labels = draw_synthetic(np.random.default_rng(0), np.array([200, 200]), 0.0, 0.5)
    other, moved = draw_synthetic(np.random.default_rng(0), np.array([200, 200]), 9.0, 0.5)
    assert np.array_equal(one, other)
    assert np.array_equal(labels, moved)  # u_i shifts all logits of a sample alike: argmax(Wx + b) does not see it


def test_a_large_alpha_rounds_no_label():
    _, labels = draw_synthetic(np.random.default_rng(0), np.array([300, 300]), 0.0, 10.0)
    _, moved = draw_synthetic(np.random.default_rng(0), np.array([300, 300]), 1e6, 10.0)
    assert np.array_equal(labels, moved)


def test_synthetic_iid_variant():
    inputs, labels = draw_synthetic(np.random.default_rng(0), np.full(20, 3000), 0.5, 0.0, True, 10, 5)
    blocks, kinds = inputs.reshape(20, 3000, 10), labels.reshape(20, 3000)
    assert np.abs(blocks.mean(axis=1)).max() < 0.1
    shares = np.stack([np.bincount(kind, minlength=5) / 3000 for kind in kinds])
    assert np.abs(shares - shares.mean(axis=0)).max() < 0.06
    rng = np.random.default_rng(0)
    rng.normal(0, 0.5, 20), rng.normal(0, 0.0, 20)
    model = rng.standard_normal((11, 5))
    assert np.mean((inputs @ model[:10] + model[10]).argmax(axis=1) == labels) > 0.9999
    shifted, _ = draw_synthetic(np.random.default_rng(0), np.full(4, 3000), 0.5, 3.0, True, 10, 5)
    centres = shifted.reshape(4, 3000, 10).mean(axis=1)
    assert np.ptp(centres, axis=1).max() < 0.1
    assert np.ptp(centres[:, 0]) > 1


@pytest.mark.parametrize(
    "arguments", [{"alpha": -1.0}, {"beta": -0.1}, {"num_clients": 0}, {"dimension": 0}, {"num_classes": 1}]
)
def test_synthetic_refuses_by_name(arguments):
    with pytest.raises(ConfigurationError, match=r"data\." + next(iter(arguments))):
        SyntheticDataModule(**arguments)


def test_the_partition_follows_seed_everything(monkeypatch):
    hashes = []
    for seed in ("1", "1", "2"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        hashes.append(ready(DigitsDataModule()).partition_hash())
    assert hashes[0] == hashes[1] != hashes[2]
    assert seeding.global_seed() == 2
