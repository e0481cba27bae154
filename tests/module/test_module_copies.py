"""Copies of the user's module, of its data and its trainer in the middle of a run leave the run where it is."""

import copy
import io
import pickle

import pytest
import torch
from helpers.boring import BoringData, Plain, assert_equal_trees, make_trainer
from helpers.marks import each_engine
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import LRScheduler

from fedbc_lightning import FedAvg
from fedbc_lightning.engines.recorded import step_recorder


class Snapshots(Callback):
    """Copies the module at each round's start, as averages of weights and teachers do, and takes a step on the copy."""

    def __init__(self):
        self.teachers, self.saved = [], io.BytesIO()

    def on_round_start(self, trainer, pl_module, *args):
        self.teachers.append(copy.deepcopy(pl_module))
        self.teachers[-1].training_step([torch.ones(4, 10), torch.zeros(4, dtype=torch.long)], 0)
        assert copy.deepcopy(pl_module.trainer) is pl_module.trainer
        assert pickle.loads(pickle.dumps(pl_module.trainer)).current_round == trainer.current_round
        self.saved.seek(0)
        torch.save(pl_module, self.saved)


class Holding(LRScheduler):
    """A scheduler that holds the module."""

    def __init__(self, optimizer, module):
        self.held = [module]
        super().__init__(optimizer)

    def get_lr(self):
        return [group["initial_lr"] for group in self.optimizer.param_groups]


class Scheduled(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [Holding(optimizer, self)]


def run(root, model, callbacks=(), **options):
    torch.manual_seed(0)
    module = model()
    options = {"record_steps": True, **options}
    trainer = make_trainer(root, callbacks=list(callbacks), eval_every_n_rounds=0, local_epochs=3, **options)
    trainer.fit(module, BoringData(batch_size=8), FedAvg())
    return dict(module.state_dict()), trainer.federation.bench.recorder


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 3, "mapped": 2})


@each_engine
def test_the_module_is_copied_without_its_run(tmp_path, engine):
    snapshots = Snapshots()
    plain, _ = run(tmp_path / "plain", Plain, engine=engine)
    copied, recorder = run(tmp_path / "copied", Plain, [snapshots], engine=engine)
    assert_equal_trees(copied, plain)
    assert recorder._found
    assert len(snapshots.saved.getvalue()) < 50_000
    snapshots.saved.seek(0)
    saved = torch.load(snapshots.saved, weights_only=False)
    assert_equal_trees(dict(saved.state_dict()), dict(snapshots.teachers[-1].state_dict()))
    assert not copy.deepcopy(recorder)._found


def test_a_scheduler_may_hold_the_module(tmp_path):
    held, _ = run(tmp_path / "held", Scheduled, record_steps=True)
    written, _ = run(tmp_path / "written", Scheduled, record_steps=False)
    assert_equal_trees(held, written)
