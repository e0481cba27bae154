"""Synthetic regression: the formulas of the Fed+ paper, and what the module makes of them."""

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import SyntheticDataModule, SyntheticRegressionDataModule
from fedbc_lightning.datamodules.synthetic import draw_regression

from fedbc_lightning.core.errors import ConfigurationError


@pytest.mark.parametrize("std", [False, True])
def test_formulas(std):
    """Many samples of a few clients: least squares gives w and the noise, moments give the mean and variances of x."""
    power = 2 if std else 1
    inputs, targets = draw_regression(np.random.default_rng(0), 6, 30_000, 100, std)
    assert (inputs.dtype, targets.dtype) == (np.float32, np.float32)
    variances = np.array([1.0 if j % 50 == 0 else (j % 50) ** -1.1 for j in range(1, 101)])
    assert inputs.var(axis=1).mean(axis=0) == pytest.approx(variances, rel=0.05)
    means = inputs.mean(axis=1).astype(np.float64)
    assert means.var() == pytest.approx(0.5**power, rel=0.15)
    models, noise = [], []
    for x, y in zip(inputs.astype(np.float64), targets.astype(np.float64), strict=True):
        model, (rest,), *_ = np.linalg.lstsq(x, y, rcond=None)
        models.append(model)
        noise.append(rest / len(y))
    assert noise == pytest.approx([2.0**power] * 6, rel=0.05)
    center = np.median(models[:-1], axis=0)
    assert center.var() == pytest.approx(5.0**power, rel=0.35)
    assert np.var(models[-1]) == pytest.approx(50.0**power, rel=0.35)
    spread = np.std([model - center for model in models[:-1]])
    assert spread == pytest.approx(0.5 * np.sqrt(2), rel=0.3)  # Laplace(b): b sqrt(2)
    assert np.abs(models[-1] - center).mean() > 3 * np.abs(models[0] - center).mean()


def test_defaults():
    data = SyntheticRegressionDataModule(seed=0)
    data.prepare_data()
    data.setup()
    data.validate_clients()
    assert (data.num_clients, data.label_histogram()) == (10, None)
    assert data.num_samples("train").tolist() == data.num_samples("test").tolist() == [50] * 10
    inputs, targets = next(iter(data.client_train_dataloader(0)))
    assert (inputs.shape, inputs.dtype) == ((10, 1000), torch.float32)
    assert (targets.shape, targets.dtype) == ((10,), torch.float32)
    same, other = SyntheticRegressionDataModule(seed=0), SyntheticRegressionDataModule(seed=1)
    same.setup()
    other.setup()
    assert torch.equal(same.source.pool.tensors[0], data.source.pool.tensors[0])
    assert not torch.equal(other.source.pool.tensors[0], data.source.pool.tensors[0])


@pytest.mark.parametrize(
    "arguments", [{"num_clients": 0}, {"samples_per_client": 0}, {"dimension": 0}, {"dimension": 1.5}]
)
def test_impossible_arguments(arguments):
    with pytest.raises(ConfigurationError, match=rf"data\.{next(iter(arguments))}"):
        SyntheticRegressionDataModule(**arguments)


def test_synthetic_of_fed_plus():
    """alpha = 1000, beta = 10: as standard deviations, and as variances by their square roots."""
    for alpha, beta in ((1000, 10), (1000**0.5, 10**0.5)):
        data = SyntheticDataModule(alpha, beta, num_clients=70, dimension=5, seed=0)
        data.setup()
        data.validate_clients()
        centers = np.array([data.source.pool.tensors[0][part].mean() for part in data.parts])
        assert centers.std() == pytest.approx(beta, rel=0.25)
    assert (data.num_clients, data.client_names) == (70, None)
