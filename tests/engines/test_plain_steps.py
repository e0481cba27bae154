"""Steps that nobody watches: the bare loop gives the numbers of the one with every hook in it, bit for bit."""

import pytest
import torch
from helpers.boring import BoringModel
from helpers.steps import OPTIMIZERS, assert_same_run, fit
from lightning.pytorch import Callback

from fedbc_lightning import SCAFFOLD, FedAvg, FedBC, FedProx
from fedbc_lightning.algorithms import FedAvgPlus
from fedbc_lightning.engines.hooked_step import HookedStep
from fedbc_lightning.engines.plain_step import WrittenStep
from fedbc_lightning.federation.checkpoint_content import module_state_of

BY_VALUE = {"gradient_clip_algorithm": "value"}


class Watcher(Callback):
    """Listens to steps, and does nothing."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass


class Model(BoringModel):
    def __init__(self, optimizer="sgd", schedules=False, skips=False):
        super().__init__()
        self.kind, self.schedules, self.skips = optimizer, schedules, skips

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return None if self.skips and batch_idx == 1 else loss

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[self.kind](list(self.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}] * self.schedules


def run(root, algorithm=FedAvg, model=Model, is_watched=False, **options):
    return fit(root, model, algorithm, callbacks=[Watcher()] * is_watched, **{"local_epochs": 1} | options)


@pytest.mark.parametrize(
    ("algorithm", "model", "options"),
    [
        (FedAvg, {}, {}),
        (lambda: FedBC(dual_lr=0.1), {"optimizer": "momentum"}, {"gradient_clip_val": 0.5}),
        (lambda: FedProx(mu=0.1), {"optimizer": "adam"}, {"gradient_clip_val": 0.01} | BY_VALUE),
        (SCAFFOLD, {"optimizer": "momentum"}, {"local_epochs": 2}),
        (lambda: FedAvgPlus(sigma=0.1), {}, {}),
        (FedAvg, {"optimizer": "groups"}, {}),
        (lambda: FedBC(dual_lr=0.1), {"skips": True}, {}),
        (FedAvg, {"skips": True, "schedules": True}, {"local_epochs": None, "local_steps": 2}),
        (FedAvg, {"schedules": True}, {"local_epochs": None, "local_steps": 7}),
        (FedAvg, {}, {"precision": "bf16-mixed"}),
    ],
)
def test_the_same_numbers(tmp_path, monkeypatch, algorithm, model, options):
    ways = []
    for way in (WrittenStep, HookedStep):
        monkeypatch.setattr(way, "take", lambda *a, way=way, real=way.take: ways.append(way) or real(*a))
    plain, watched = (run(tmp_path, algorithm, lambda: Model(**model), k, **options) for k in (False, True))
    assert set(ways) == {WrittenStep, HookedStep}
    assert_same_run(plain, watched)


class Zeroing(Model):
    """Zeroes the gradients itself, as with manual optimization."""

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


def test_a_step_that_zeroes_gradients_itself_is_trained(tmp_path):
    runs = [run(tmp_path, model=lambda kind=kind: kind("adam")) for kind in (Zeroing, Model)]
    zeroing, plain = (module_state_of(trainer.federation) for trainer in runs)
    torch.testing.assert_close(zeroing, plain, rtol=0, atol=0)
