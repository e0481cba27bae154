"""Code of the user's between replayed steps: it sees, logs and gives what it does between steps as written."""

import pytest
import torch
from helpers.boring import BoringData, assert_equal_trees, read_csv, without_times
from helpers.steps import Smooth
from test_recorded_steps import compare, recordings, run
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedbc_lightning.data.loading import ClientLoader
from fedbc_lightning.federation.checkpoint_content import module_state_of

__all__ = ["recordings"]


class Scheduled(Smooth):
    """Logs its loss, and has a scheduler that is stepped with every step."""

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.3, momentum=0.9)
        return [optimizer], [{"scheduler": self.make_scheduler(optimizer), "interval": "step", "monitor": "train_loss"}]

    def make_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


class Plateau(Scheduled):
    def make_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)


class LoggingRates(Scheduled):
    """Logs what needs autograd, under a name of its own and under the step's."""

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        weight = self.net[0].weight
        self.log("train_rate", scheduler.get_last_lr()[0])
        self.log("train_loss", torch.autograd.grad(weight.pow(2).sum(), weight)[0].norm())


class LoggingInHook(Scheduled):
    """The hook's values come before the step's next ones, so that equal names are added up in this order."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.3, momentum=0.9)
        optimizer.register_step_post_hook(self.look)
        return optimizer

    def look(self, optimizer, args, options):
        norm = sum(parameter.norm() for parameter in optimizer.param_groups[0]["params"])
        seen = self.trainer.callback_metrics
        self.log("train_norm", norm + 1e-3 * self.trainer.global_step + float(seen.get("train_loss", 0)))
        self.log("train_loss", norm)


@pytest.mark.parametrize("model", [Scheduled, Plateau, LoggingRates, LoggingInHook])
def test_what_runs_between_the_steps(tmp_path, monkeypatch, recordings, model):
    compare(tmp_path, monkeypatch, model)
    assert (recordings.replays > 3) == (model is not LoggingInHook)  # a hook of the optimizer sees steps as written
    assert recordings.recorders[0].reason is None


class ReadsInTest(Smooth):
    def test_step(self, batch, batch_idx):
        trainer = self.trainer
        planned = ("estimated_stepping_batches", "num_training_batches")
        for name in ("global_step", "max_epochs", "current_epoch", *planned):
            self.log(f"test_{name}", float(getattr(trainer, name)))
        self.log("test_heard", float(sum(not name.startswith("time/") for name in trainer.callback_metrics)))


def metrics(trainer):
    return without_times(read_csv(f"{trainer.log_dir}/metrics.csv"))


def test_outside_clients_the_module_sees_no_client(tmp_path, recordings):
    options = {"eval_every_n_rounds": 1, "max_rounds": 3}
    recorded = run(tmp_path, ReadsInTest, **options)
    assert recordings.replays > 3
    assert metrics(recorded) == metrics(run(tmp_path, ReadsInTest, record_steps=False, **options))
    assert [row["global_step/global"] for row in metrics(recorded)] == [f"{round}.0" for round in range(4)]
    run(tmp_path, ReadsInTest, name="stopped", **options | {"max_rounds": 2})
    resumed = run(tmp_path, ReadsInTest, name="stopped", ckpt_path="last", **options)
    assert metrics(resumed) == metrics(recorded)


class Doubling(ClientLoader):
    def __iter__(self):
        for inputs, targets in super().__iter__():
            yield [2 * inputs, targets]


class Thinned:
    """Wraps a loader, knows none of its other ways to give batches, and leaves the last two batches out."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        if name in ("_loader", "stretches", "__iter__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        for _, batch in zip(range(len(self) - 2), self._loader, strict=False):
            yield [3 * batch[0], batch[1]]


class OwnLoader(BoringData):
    def client_train_dataloader(self, *args, **options):
        loader = super().client_train_dataloader(*args, **options)
        loader.__class__ = Doubling
        return loader


class WrappedLoader(BoringData):
    def client_train_dataset(self, client):
        return super().client_train_dataset(5)

    def client_train_dataloader(self, *args, **options):
        return Thinned(super().client_train_dataloader(*args, **options))


class PerEpoch(Smooth):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)]


class Doubled(BoringData):
    def client_train_dataset(self, client):
        inputs, targets = super().client_train_dataset(client).tensors
        return TensorDataset(2 * inputs, targets)


@pytest.mark.parametrize(("data", "same"), [(OwnLoader, Doubled), (WrappedLoader, WrappedLoader)])
def test_loaders_of_ones_own(tmp_path, monkeypatch, recordings, data, same):
    """Their batches are taken one by one, and epochs end where they do."""
    trainer = compare(tmp_path, monkeypatch, PerEpoch, data=data)
    assert recordings.replays > 3
    assert recordings.recorders[0].reason is None
    other = run(tmp_path, PerEpoch, data=same)
    assert_equal_trees(module_state_of(trainer.federation), module_state_of(other.federation))
