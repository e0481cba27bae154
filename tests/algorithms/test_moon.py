"""MOON beyond the battery: steps of other forms, models with modes and draws, partial sharing, and refusals."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, make_trainer
from helpers.quadratics import QuadraticData, sample_quadratics
from helpers.reference import Local
from helpers.reference_personal import moon
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional

from algorithms.running import shuffled_steps, start_point
from algorithms.test_local_parameters import fit as fit_partially
from fedbc_lightning.algorithms import MOON, FedAvg
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import derive, seed_globals


def test_a_client_keeps_a_part_of_both_models(tmp_path):
    """The kept part of the client's last model is the one from which it starts."""
    trainer, _, sampler = fit_partially(tmp_path, MOON("features", mu=3.0), local_parameters=["tail"])
    local = Local(lr=0.1, steps=shuffled_steps(QuadraticData(), 2, seed=7, epochs=2))
    rounds = [clients for _, clients in sorted(sampler.rounds.items())]
    is_kept = np.array([False, True, True, True])
    expected = moon(sample_quadratics(), rounds, start_point(), local, mu=3.0, is_kept=is_kept)
    np.testing.assert_allclose(trainer.server.z.numpy(), expected["z"][-1][:1], rtol=0, atol=1e-9)
    for client in range(5):
        kept = trainer.clients.vector("local_parameters", client).numpy()
        np.testing.assert_allclose(kept, expected["local_model"][-1][client][1:], rtol=0, atol=1e-9)


class Noisy(LightningModule):
    """Noise on the inputs, BatchNorm, dropout: a forward pass depends on the mode, on buffers and on draws."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.dropout, self.head, self.lr = nn.Dropout(0.3), nn.Linear(6, 3), lr

    def seen(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs + 0.3 * torch.randn_like(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = functional.cross_entropy(self.head(self.dropout(self.seen(batch[0]))), batch[1])
        self.log("train_entropy", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class Two(BoringData):
    num_clients = 2


OPTIONS = {"max_rounds": 3, "clients_per_round": 1.0, "precision": "64-true", "local_epochs": 2, "seed": 1}


def test_features_by_other_models_in_evaluation_mode_and_with_the_same_draws(tmp_path):
    """Three rounds of two clients by hand, with whole copies of the models."""
    trainer = make_trainer(tmp_path, **OPTIONS)
    trainer.fit(Noisy(), Two(), MOON("body", mu=2.0, weighting="uniform"))
    z, data = Noisy().double(), Two()
    last = [copy.deepcopy(z), copy.deepcopy(z)]
    for number in (1, 2, 3):
        ends = []
        for client in range(2):
            seed_globals(derive(1, "client", number, client), torch.device("cpu"))
            net, near, far = copy.deepcopy(z).train(), copy.deepcopy(z).eval(), last[client].eval()
            net.log = lambda *_: None
            optimizer = net.configure_optimizers()
            for epoch in range(2):
                loader = data.client_train_dataloader(client, number, seed=1)
                loader.set_epoch(epoch)
                for inputs, targets in loader:
                    state, found = torch.get_rng_state(), []
                    for model in (near, far, net):
                        torch.set_rng_state(state)
                        found.append(model.seen(inputs.double()))
                    of_near, of_far, own = found
                    loss = functional.cross_entropy(net.head(net.dropout(own)), targets)
                    scores = torch.stack(
                        [functional.cosine_similarity(own, other.detach()) / 0.5 for other in (of_near, of_far)], dim=1
                    )
                    loss = loss + 2.0 * functional.cross_entropy(scores, torch.zeros(len(own), dtype=torch.long))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            ends.append(net)
        states, last = [end.state_dict() for end in ends], ends
        z.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
    expected = nn.utils.parameters_to_vector(z.parameters())
    torch.testing.assert_close(trainer.server.z, expected.detach(), rtol=1e-10, atol=1e-10)


class Odd(Noisy):
    """A body that is used in a way of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.pair, self.flat = way, nn.LSTM(10, 6, batch_first=True), nn.Flatten(0)
        self.body.requires_grad_(way != "frozen")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs = batch[0]
        features = self.body(inputs)
        if self.way == "flat":
            features = self.flat(features).reshape(-1, 6)
        return functional.cross_entropy(self.head(features), batch[1])


@pytest.mark.parametrize(
    ("way", "layer", "message"),
    [
        ("plain", "boddy", r"Odd has no layer 'boddy'; did you mean 'body'\?"),
        ("plain", "pair", "'pair' is called 0 times by training_step"),
        ("flat", "flat", r"'flat' returns the shape \(96,\), not one vector for each sample"),
        ("frozen", "body", "'body' has no gradient"),
    ],
)
def test_layers_without_features_are_refused(tmp_path, way, layer, message):
    with pytest.raises(ConfigurationError, match=r"algorithm\.features: .*" + message):
        make_trainer(tmp_path, max_rounds=1, clients_per_round=2).fit(Odd(way), Two(), MOON(layer))


class Writing(Noisy):
    """Writes into its batch, takes it apart, and counts its steps in a buffer that does not travel."""

    def __init__(self, is_writing: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 6), nn.Tanh())
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.is_writing, self.counts = is_writing, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        if self.is_writing:
            labels = batch.pop()
            inputs = batch[0].sub_(0.5).mul_(2)
        else:
            inputs, labels = (batch[0] - 0.5) * 2, batch[1]
        loss = functional.cross_entropy(self.head(self.body(inputs)), labels)
        self.counts.append(int(self.calls))
        return loss


def test_passes_by_other_models_leave_batch_and_buffers_alone(tmp_path):
    models, counts = [], []
    for is_writing, algorithm in ((True, MOON("body")), (False, MOON("body")), (False, FedAvg())):
        module, trainer = Writing(is_writing), make_trainer(tmp_path, **OPTIONS | {"max_rounds": 1})
        trainer.fit(module, Two(), algorithm)
        models.append(trainer.server.z)
        counts.append(module.counts)
    assert torch.equal(*models[:2])
    assert counts[0] == counts[1] == counts[2]
