"""FedNova beyond the battery: momentum, unequal steps, refusals, and where it is FedAvg."""

from __future__ import annotations

import pytest
import torch
from helpers.boring import BoringData, make_trainer
from helpers.quadratics import QuadraticData, Recorder, sample_quadratics
from helpers.reference import Local
from lightning.pytorch import LightningModule

from algorithms.registry import BY_NAME
from algorithms.running import fit, shuffled_steps
from algorithms.test_conformance import compare
from fedbc_lightning import algorithms
from fedbc_lightning.core.errors import ConfigurationError


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_fednova_counts_momentum_and_unequal_steps(tmp_path, engine):
    """Batches of 2: the clients take 2 to 8 steps, and the coefficients of their gradients grow with momentum."""
    data = QuadraticData(sample_quadratics(), batch_size=2)
    local = Local(lr=0.05, momentum=0.5, steps=shuffled_steps(data, 2, epochs=2))
    options = {"lr": 0.05, "momentum": 0.5, "local_epochs": 2, "engine": engine}
    compare(tmp_path, BY_NAME["fednova-samples"], local, data, **options)


@pytest.mark.parametrize("options", [{"decay": 0.9}, {"gradient_clip_val": 0.5}, {"lbfgs": True}])
def test_fednova_refuses_steps_whose_weights_are_unknown(tmp_path, options):
    with pytest.raises(ConfigurationError, match="FedNova divides by the weight of a client's gradients"):
        fit(tmp_path, algorithms.FedNova(), QuadraticData(sample_quadratics()), Recorder(), **options)


def test_fednova_is_fedavg_where_all_take_equally_many_steps(tmp_path):
    found = []
    for algorithm in (algorithms.FedNova(), algorithms.FedAvg()):
        data = QuadraticData(sample_quadratics(), batch_size=2)
        trainer, _ = fit(tmp_path, algorithm, data, Recorder(), max_rounds=5, local_steps=3)
        found.append(trainer.server.z)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


class Idle(LightningModule):
    """A linear model that finds no loss in the batches of client 2."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(10, 3)

    def training_step(self, batch, batch_idx):
        if self.trainer.current_client == 2:
            return None
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


class Few(BoringData):
    num_clients = 2


class More(BoringData):
    num_clients = 3


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_client_without_a_step_has_no_part(tmp_path, weighting):
    found = []
    for data in (Few, More):
        trainer = make_trainer(
            tmp_path / data.__name__, max_rounds=3, clients_per_round=1.0, precision="64-true", eval_every_n_rounds=0
        )
        trainer.fit(Idle(), data(), algorithms.FedNova(weighting))
        found.append(trainer.server.z)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
