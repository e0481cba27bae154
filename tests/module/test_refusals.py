"""What cannot be honoured is refused by name before any training step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.user_modules import UserData, _Classifier
from lightning.fabric.strategies import FSDPStrategy
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import FedBC
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import PartitionedDataModule
from fedbc_lightning.partition import IID

from .test_parity import federated


class Guarded(_Classifier):
    """A good module that fails the test as soon as a training step runs."""

    def training_step(self, batch, batch_idx):
        pytest.fail("a training step ran before the refusal")


class NoTrainingStep(Guarded):
    training_step = LightningModule.training_step


class NoConfigureOptimizers(Guarded):
    configure_optimizers = LightningModule.configure_optimizers


class TakesLoader(Guarded):
    def test_step(self, batch, batch_idx, dataloader_idx):
        return None


class DPOptimizer(SGD):
    """Stands for the optimizer of Opacus, which is not installed here."""


def altered(change: Callable[[Guarded], Any]) -> Callable[[], Guarded]:
    """A good module after a change to it."""

    def make():
        module = Guarded()
        change(module)
        return module

    return make


def configured(returned: Callable[[Any, Any], Any]) -> Callable[[], Guarded]:
    """A good module whose configure_optimizers returns a function of the module and an optimizer."""

    def change(module):
        module.configure_optimizers = lambda: returned(module, SGD(module.parameters(), lr=0.1))

    return altered(change)


def run(tmp_path, module=Guarded, data=None, **options):
    """Fit with everything good but what the caller gives."""
    federated(tmp_path, module(), UserData((9, 7)) if data is None else data, **{"local_epochs": 1} | options)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            configured(lambda m, o: [SGD([p], lr=0.1) for p in m.net[0].parameters()]),
            "2 optimizers; return one, or step",
        ),
        (configured(lambda m, o: None), "configure_optimizers returned 0 optimizers"),
        (configured(lambda m, o: SGD([nn.Parameter(torch.zeros(3))], lr=0.1)), "not the module's"),
        (configured(lambda m, o: ([o], [{"scheduler": lr_scheduler.StepLR(o, 1), "interval": "batch"}])), "batch"),
        (configured(lambda m, o: ([o], [lr_scheduler.ReduceLROnPlateau(o)])), "monitor"),
        (NoTrainingStep, "NoTrainingStep has no training_step"),
        (NoConfigureOptimizers, "has no configure_optimizers"),
        (altered(lambda m: m.requires_grad_(False)), "(?i)trainable|requires_grad"),
        (altered(lambda m: m.register_parameter("more", nn.Parameter(torch.zeros(2).double()))), "float64"),
        (altered(lambda m: m.register_parameter("more", nn.Parameter(torch.zeros(2) * 1j))), "complex"),
        (altered(lambda m: setattr(m, "net", nn.LazyLinear(3))), "(?i)lazy|uninitiali[sz]ed"),
        (TakesLoader, r"only a single `test_dataloader`, but have included `dataloader_idx` in `TakesLoader.test_step"),
        (lambda: nn.Linear(2, 2), "LightningModule"),
        (lambda: Guarded, "model: got the class Guarded, not an object such as"),
    ],
)
def test_modules_that_cannot_be_honoured(tmp_path, module, names):
    """Named and refused: manual or several optimizers, missing methods, odd parameters and schedulers."""
    with pytest.raises(ConfigurationError, match=names) as caught:
        run(tmp_path, module)
    assert "\n" not in str(caught.value).strip()


def test_an_optimizer_of_opacus(tmp_path, monkeypatch):
    # For the time of the test alone: the command line imports all optimizers that Python knows from their modules.
    monkeypatch.setattr(DPOptimizer, "__module__", "opacus.optimizers.optimizer")
    with pytest.raises(ConfigurationError, match=r"Opacus' DPOptimizer.*original_optimizer"):
        run(tmp_path, configured(lambda m, o: DPOptimizer(m.parameters())))


@pytest.mark.parametrize("strategy", ["fsdp", "no-such-strategy", FSDPStrategy], ids=str)
def test_strategies_that_shard_the_model(tmp_path, strategy):
    """FSDP, DeepSpeed and the like raise at construction of the trainer."""
    with pytest.raises(ConfigurationError, match=r"(?i)strategy"):
        FederatedTrainer(
            accelerator="cpu", strategy=strategy() if callable(strategy) else strategy, default_root_dir=str(tmp_path)
        )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"clients_per_round": 3}, r"clients_per_round.*3"),
        ({"name": "../elsewhere"}, r"trainer\.name: got"),
        ({"local_epochs": 1, "local_steps": 1}, r"local_epochs.*local_steps|local_steps.*local_epochs"),
        ({"accelerator": "abacus"}, r"accelerator.*abacus"),
        ({"callbacks": [ModelCheckpoint()]}, r"ModelCheckpoint.*RoundCheckpoint"),
        ({"algorithm": lambda: FedBC(dual_lr=0.1, dual_min=2.0, dual_max=1.0)}, r"dual_m(in|ax)"),
        ({"algorithm": lambda: FedBC(dual_lr=0.1, dual_init=3.0, dual_max=1.0)}, r"dual_init.*3"),
        ({"algorithm": lambda: FedBC(dual_lr=0.1, tolerance=[1.0, 2.0, 3.0])}, r"tolerance.*3.*2|tolerance.*2.*3"),
    ],
)
def test_impossible_values_of_the_trainer_and_of_methods(tmp_path, options, names):
    """Issue, 'Bad input': the message names the key and the value, and the caller's module is as it was."""
    module = Guarded()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigurationError, match=names):
        run(tmp_path, lambda: module, **{name: v() if name == "algorithm" else v for name, v in options.items()})
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


class Streaming(IterableDataset):
    def __iter__(self) -> Any:
        yield from ((torch.zeros(8), torch.tensor(0)) for _ in range(8))


class Wrapped(LightningDataModule):
    """An ordinary data module around whatever train_dataloader it is given."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


def _pairs(size: int = 12) -> TensorDataset:
    return TensorDataset(torch.randn(size, 8), torch.arange(size) % 3)


def wrapped(loader: Any, kind: type[Wrapped] = Wrapped) -> PartitionedDataModule:
    return PartitionedDataModule(kind(loader), IID(num_clients=2))


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (lambda: wrapped(DataLoader(Streaming(), batch_size=4)), "Streaming"),
        (lambda: wrapped([DataLoader(_pairs(), batch_size=4)] * 2), "train_dataloader"),
        (lambda: wrapped([1, 2, 3]), "train_dataloader"),
        (lambda: wrapped(DataLoader(_pairs(), batch_size=None)), "batch_size"),
        (lambda: wrapped(DataLoader(_pairs(), batch_sampler=[[0, 1], [2, 3, 4]])), "SequentialSampler, list, whose"),
        (lambda: UserData((9, 0)), r"(?i)client 1.*(empty|no .*sample)|1 has no"),
        (lambda: UserData(()), r"(?i)num_clients|no clients|0"),
        (lambda: Wrapped(DataLoader(_pairs())), "PartitionedDataModule"),
        (lambda: DataLoader(_pairs()), "(?i)FederatedDataModule|datamodule"),
    ],
)
def test_data_that_cannot_be_trained_on(tmp_path, data, names):
    """An empty client, and what is no single DataLoader over a map-style set, are named."""
    with pytest.raises(ConfigurationError, match=names):
        run(tmp_path, data=data())
