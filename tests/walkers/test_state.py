"""One of many parts of the walk over what a module can hold, and what each kind of method makes of the rarest of it."""

import warnings

import pytest
import torch
from algorithms.registry import SETTINGS
from helpers.user_modules import CLASSES, FEATURES, UserData
from lightning.pytorch import LightningModule
from torch import nn

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import FedAvgPlus
from fedbc_lightning.federation.checkpoint_content import module_state_of
from walkers.state import QUIET, main


def test_a_part_of_the_walk_finds_no_difference(capsys):
    with warnings.catch_warnings():
        status = main(["--part", "156/400"])
    assert status == 0, capsys.readouterr().out


class Rare(LightningModule):
    """Parameters of shapes () and (0, 4), as of CLIP, and buffers with -inf and in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.scale = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("wide", torch.tensor(1 / 3, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        self.wide += 1e-12
        return nn.functional.cross_entropy(self.net(batch[0]) * self.scale + self.empty.sum(), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


METHODS = "fedavgm fedplus-norm fedgeomed_plus fedbuff fedasync fednova l2gd fedbc-learned rfa fedpd-default"


@pytest.mark.parametrize("name", METHODS.split())
def test_every_kind_of_mean_keeps_what_has_no_mean(tmp_path, name):
    setting = next(setting for setting in SETTINGS if setting.name.startswith(name))
    module = Rare()
    trainer = FederatedTrainer(max_rounds=2, seed=0, default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, UserData((9, 14, 6, 8, 10)), setting.build())
    assert module.mask.tolist() == [0, -torch.inf]
    assert module.wide.dtype == torch.float64
    assert 0 < float(module.wide - 1 / 3) < 1e-10
    assert torch.isfinite(module.net.weight).all()
    assert module.scale != 1


class Counting(Rare):
    def on_client_start(self, client):
        if client:
            self.mask[1] = self.mask[1].clamp(min=0) + 1


def test_without_mixing_a_client_of_fedplus_begins_with_its_own_buffers(tmp_path):
    trainer = FederatedTrainer(max_rounds=2, seed=0, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Counting(), UserData((9, 14)), FedAvgPlus(sigma=0.1))
    own = trainer.federation.models().local(1)
    assert module_state_of(trainer.federation, own)["mask"].tolist() == [0, 2]
