"""Steps that nobody watches: the bare loop gives the numbers of the one with every hook in it, bit for bit."""

from pathlib import Path

import pytest
import torch
from helpers.boring import BoringData, BoringModel, make_trainer
from lightning.pytorch import Callback
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedbc_lightning import SCAFFOLD, FedAvg, FedBC, FedProx
from fedbc_lightning.algorithms import FedAvgPlus
from fedbc_lightning.engines.client_run import OptimizerRun
from fedbc_lightning.engines.hooked_step import HookedStep
from fedbc_lightning.federation.checkpoint_content import module_state_of, state_of

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5),
    "groups": lambda p: torch.optim.RMSprop([{"params": p[:1]}, {"params": p[1:3], "lr": 0.05}], 0.01),
}

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


def run(root, algorithm, watched, model=None, kind=Model, **kwargs):
    torch.manual_seed(1)
    model = kind(**(model or {}))
    kwargs = {"max_rounds": 2} | kwargs
    trainer = make_trainer(root, callbacks=[Watcher()] * watched, name=f"watched-{watched}", **kwargs)
    trainer.fit(model, BoringData(), algorithm())
    return trainer


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
    for owner, name in ((OptimizerRun, "_take_written"), (HookedStep, "take")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, name=name: ways.append(name) or real(*a))
    plain, watched = (run(tmp_path, algorithm, is_watched, model, **options) for is_watched in (False, True))
    assert set(ways) == {"_take_written", "take"}
    first, second = (state_of(trainer.federation) | module_state_of(trainer.federation) for trainer in (plain, watched))
    first.pop("fingerprint"), second.pop("fingerprint")
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    tables = [Path(trainer.log_dir, "clients.csv").read_text() for trainer in (plain, watched)]
    assert tables[0] == tables[1]


def test_step_hooks_of_torch_are_called(tmp_path):
    """On the optimizer or on all of them: the wrapping of ``step`` stays where somebody has put a hook."""
    calls = []
    handle = register_optimizer_step_post_hook(lambda *args: calls.append("global"))
    try:
        run(tmp_path, FedAvg, False)
    finally:
        handle.remove()
    num_steps = len(calls)
    assert num_steps > 0

    class Hooked(Model):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            optimizer.register_step_pre_hook(lambda *args: calls.append("own"))
            return optimizer

    run(tmp_path, FedAvg, False, kind=Hooked)
    assert calls.count("own") == num_steps


class Zeroing(Model):
    """Zeroes the gradients itself, as with manual optimization."""

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


def test_a_step_that_zeroes_gradients_itself_is_trained(tmp_path):
    runs = [run(tmp_path, FedAvg, False, {"optimizer": "adam"}, kind) for kind in (Zeroing, Model)]
    zeroing, plain = (module_state_of(trainer.federation) for trainer in runs)
    torch.testing.assert_close(zeroing, plain, rtol=0, atol=0)
