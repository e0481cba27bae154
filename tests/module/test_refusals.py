"""What cannot be honoured is refused by name before any training step (DESIGN 2, 6, 11.1, 11.5; issue 'Bad input')."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.user_modules import UserData, _Classifier
from lightning.fabric.strategies import FSDPStrategy
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import SCAFFOLD, FedAvg, FedBC, FedProx
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import PartitionedDataModule
from fedbc_lightning.partition import IID


class Guarded(_Classifier):
    """A good module that fails the test as soon as a training step runs."""

    def training_step(self, batch, batch_idx):
        pytest.fail("a training step ran before the refusal")


class Manual(Guarded):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Guarded):
    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=0.1) for p in self.net[0].parameters()]


class NoOptimizer(Guarded):
    def configure_optimizers(self):
        return None


class NoTrainingStep(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoConfigureOptimizers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        pytest.fail("a training step ran before the refusal")


class OwnLog(Guarded):
    def log(self, name, value, **options):
        super().log(f"mine/{name}", value, **options)


class Frozen(Guarded):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class MixedTypes(Guarded):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))


class ComplexTypes(Guarded):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class Lazy(Guarded):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(3)


class ForeignParameters(Guarded):
    def configure_optimizers(self):
        return torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)


class UnknownScheduler(Guarded):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "batch"}}


class PlateauWithoutMonitor(Guarded):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


def run(
    tmp_path: Path, module: Any = None, data: Any = None, algorithm: Any = None, sizes: Any = (9, 7), **options: Any
) -> None:
    """Fit with everything good but what the caller gives."""
    settings = {
        "max_rounds": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "default_root_dir": str(tmp_path),
    }
    trainer = FederatedTrainer(**settings | options)
    trainer.fit(
        Guarded() if module is None else module(),
        datamodule=UserData(sizes) if data is None else data,
        algorithm=FedAvg() if algorithm is None else algorithm(),
    )


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Manual, r"(?i)manual|automatic_optimization"),
        (TwoOptimizers, r"(?i)configure_optimizers.*(2|two|one) "),
        (NoOptimizer, r"configure_optimizers"),
        (NoTrainingStep, r"training_step"),
        (NoConfigureOptimizers, r"configure_optimizers"),
        (Frozen, r"(?i)trainable|requires_grad"),
        (MixedTypes, r"(?i)float64"),
        (ComplexTypes, r"(?i)complex"),
        (Lazy, r"(?i)lazy|uninitiali[sz]ed"),
        (ForeignParameters, r"(?i)configure_optimizers|optimizer"),
        (UnknownScheduler, r"interval.*batch|batch.*interval"),
        (PlateauWithoutMonitor, r"monitor"),
        (OwnLog, r"OwnLog.log is a method of its own.*let it call self.log"),
        (lambda: nn.Linear(2, 2), r"LightningModule"),
    ],
)
def test_modules_that_cannot_be_honoured(tmp_path, module, names):
    """DESIGN 2, 6: named and refused: manual or several optimizers, missing methods, odd parameters and schedulers."""
    with pytest.raises(ConfigurationError, match=names) as caught:
        run(tmp_path, module)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        "deepspeed",
        "no-such-strategy",
        pytest.param(FSDPStrategy, id="FSDPStrategy"),
    ],
)
def test_strategies_that_shard_the_model(tmp_path, strategy):
    """DESIGN 6: FSDP, DeepSpeed and the like raise at construction of the trainer."""
    with pytest.raises(ConfigurationError, match=r"(?i)strategy"):
        FederatedTrainer(
            accelerator="cpu", strategy=strategy() if callable(strategy) else strategy, default_root_dir=str(tmp_path)
        )


def test_model_checkpoint_is_refused_with_the_way_out(tmp_path):
    """DESIGN 6: ModelCheckpoint does not run with rounds; the message names it and what to use instead."""
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint.*RoundCheckpoint"):
        run(tmp_path, callbacks=[ModelCheckpoint()])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"clients_per_round": 3}, r"clients_per_round.*3"),
        ({"clients_per_round": 0}, r"clients_per_round.*0"),
        ({"clients_per_round": 1.5}, r"clients_per_round.*1\.5"),
        ({"clients_per_round": float("nan")}, r"clients_per_round.*nan"),
        ({"local_steps": 0}, r"local_steps.*0"),
        ({"local_epochs": 1, "local_steps": 1}, r"local_epochs.*local_steps|local_steps.*local_epochs"),
        ({"max_rounds": -1}, r"max_rounds.*-1"),
        ({"gradient_clip_val": -0.1}, r"gradient_clip_val.*-0\.1"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "max"}, r"gradient_clip_algorithm.*max"),
        ({"accumulate_grad_batches": 0}, r"accumulate_grad_batches.*0"),
        ({"eval_clients": -1}, r"eval_clients.*-1.* 0"),
        ({"eval_clients": "some"}, r"eval_clients.*some"),
        ({"buffers": "mean"}, r"buffers.*mean"),
        ({"precision": "8-true"}, r"precision.*8-true"),
        ({"accelerator": "abacus"}, r"accelerator.*abacus"),
    ],
)
def test_impossible_values_of_the_trainer(tmp_path, options, names):
    """Issue, 'Bad input': the message names the key and the value."""
    with pytest.raises(ConfigurationError, match=names):
        run(tmp_path, **options)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: FedProx(mu=-1.0), r"mu.*-1"),
        (lambda: SCAFFOLD(control="gradient"), r"control.*gradient"),
        (lambda: FedBC(dual_lr=float("inf")), r"dual_lr.*inf"),
        (lambda: FedBC(dual_lr=0.1, dual_min=-1.0), r"dual_min.*-1"),
        (lambda: FedBC(dual_lr=0.1, dual_min=2.0, dual_max=1.0), r"dual_m(in|ax)"),
        (lambda: FedBC(dual_lr=0.1, dual_init=-0.5), r"dual_init.*-0\.5"),
        (lambda: FedBC(dual_lr=0.1, dual_init=3.0, dual_max=1.0), r"dual_init.*3"),
        (lambda: FedBC(dual_lr=0.1, tolerance="fixed"), r"tolerance.*fixed"),
        (lambda: FedBC(dual_lr=0.1, tolerance=[1.0, 2.0, 3.0]), r"tolerance.*3.*2|tolerance.*2.*3"),
        (lambda: FedBC(dual_lr=0.1, tolerance=[1.0, -2.0]), r"tolerance.*-2"),
        (lambda: FedBC(dual_lr=0.1, dual_momentum_style="nesterov"), r"dual_momentum_style.*nesterov"),
    ],
)
def test_impossible_values_of_the_algorithms(tmp_path, build, names):
    """Issue, 'Bad input': negative bounds, unknown words, a tolerance list of another length than N."""
    with pytest.raises(ConfigurationError, match=names):
        run(tmp_path, algorithm=build)


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


@pytest.mark.parametrize(
    ("loader", "names"),
    [
        (lambda: DataLoader(Streaming(), batch_size=4), r"(?i)IterableDataset|map-style|Streaming"),
        (lambda: [DataLoader(_pairs(), batch_size=4), DataLoader(_pairs(), batch_size=4)], r"(?i)train_dataloader"),
        (lambda: {"a": DataLoader(_pairs(), batch_size=4)}, r"(?i)train_dataloader"),
        (lambda: [1, 2, 3], r"(?i)train_dataloader"),
        (lambda: DataLoader(_pairs(), batch_size=None), r"(?i)batch_size"),
        (
            lambda: DataLoader(_pairs(), batch_sampler=[[0, 1], [2, 3, 4]]),
            r"draws with SequentialSampler and list, which cannot be kept inside a client",
        ),
    ],
)
def test_data_modules_that_cannot_be_wrapped(tmp_path, loader, names):
    """DESIGN 11.1: one DataLoader over a map-style set with a plain batch size; everything else is named."""
    with pytest.raises(ConfigurationError, match=names):
        run(tmp_path, data=PartitionedDataModule(Wrapped(loader()), IID(num_clients=2)))


@pytest.mark.parametrize(
    ("data", "names"),
    [
        pytest.param(lambda: UserData((9, 0)), r"(?i)client 1.*(empty|no .*sample)|1 has no", id="empty client"),
        pytest.param(lambda: UserData(()), r"(?i)num_clients|no clients|0", id="no clients"),
        pytest.param(
            lambda: Wrapped(DataLoader(_pairs())), r"(?i)PartitionedDataModule", id="an unwrapped data module"
        ),
        pytest.param(lambda: DataLoader(_pairs()), r"(?i)FederatedDataModule|datamodule", id="a bare loader"),
    ],
)
def test_data_that_cannot_be_trained_on(tmp_path, data, names):
    """Issue, 'Bad input': an empty client and things that are no federated data are named before training."""
    with pytest.raises(ConfigurationError, match=names):
        run(tmp_path, data=data())


def test_requires_grad_changed_during_training_is_refused(tmp_path):
    """DESIGN 2: 'Refused by name: ... requires_grad changed during training'."""

    class Thawing(_Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)

    with pytest.raises(ConfigurationError, match=r"requires_grad"):
        run(tmp_path, Thawing, local_epochs=2)


def test_nothing_is_left_behind_by_a_refusal(tmp_path):
    """Promise 5: wrong input fails before training; the caller's module is as it was."""
    module = Guarded()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigurationError):
        run(tmp_path, lambda: module, clients_per_round=3)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert np.isfinite(sum(value.sum().item() for value in before.values()))
