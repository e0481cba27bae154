"""Packages of other people, unchanged: each trains for two rounds, and as under lightning.Trainer on one client.

Nightly: ``pip install -e '.[test,compat]' && pytest -m compat``. What is not installed is skipped with the reason.
"""

import os
import warnings
from copy import deepcopy
from typing import Any
from unittest import mock

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import Dataset, Subset

from fedbc_lightning import FedAvg, FedBC, FederatedTrainer
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.data.datasets import num_items

from .cases import CASES

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("default")]

PARITY = {"timm": ("64-true", 1e-8), "darts": ("32-true", 1e-8)}
"""Precision and bound where they are not float32 and 0: parameters are views of one row, whose other alignment gives
convolutions and matrices of 5 columns other last bits, and BatchNorm over few values and Adam enlarge those."""

SETTINGS = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "seed": 0,
    "eval_every_n_rounds": 1,
}  # fmt: skip


class Dealt(FederatedDataModule):
    """A data set, dealt out to clients in turn, in batches of four."""

    def __init__(self, dataset: Dataset, num_clients: int, **options: Any) -> None:
        super().__init__(**{"batch_size": 4, **options})
        self.dataset, self._num_clients = dataset, num_clients

    @property
    def num_clients(self):
        return self._num_clients

    def client_train_dataset(self, client):
        return Subset(self.dataset, range(client, num_items(self.dataset), self._num_clients))

    def client_test_dataset(self, client):
        return None


LIGHTNING: dict[str, Any] = {
    "max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
}  # fmt: skip


def make(name: str) -> Any:
    """The same module and data in every call."""
    with mock.patch.dict(os.environ), torch.random.fork_rng():  # some packages set variables when they are imported
        pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[compat]'")
        torch.manual_seed(5)
        return CASES[name]()


def same(left: Any, right: Any) -> float:
    """The largest difference between the states of two modules; infinite where they have other names."""
    if left.keys() != right.keys():
        return float("inf")
    pairs = [(value.double(), right[name].double()) for name, value in left.items() if isinstance(value, torch.Tensor)]
    apart = [(a - b).abs()[~torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)] for a, b in pairs]  # inf is inf
    return max((float(each.max()) for each in apart if each.numel()), default=0.0)


def seed_client(trainer: Any, pl_module: Any) -> None:
    """Let lightning.Trainer draw what the client draws, dropout for example."""
    seed_globals(derive(0, "client", 1, 0), torch.device("cpu"))


@pytest.mark.parametrize("name", CASES)
def test_a_package_trains_for_two_rounds(tmp_path, name):
    """Two clients, two rounds of FedBC: finite, and moved."""
    module, dataset, options = make(name)
    before = deepcopy(module.state_dict())
    trainer = FederatedTrainer(max_rounds=2, default_root_dir=tmp_path, **SETTINGS)
    trainer.fit(module, Dealt(dataset, 2, **options), FedBC(dual_lr=1e-3))
    assert trainer.finished_round == 2
    after = module.state_dict()
    tensors = {key: value for key, value in before.items() if isinstance(value, torch.Tensor)}
    assert all(after[key][value.isfinite()].isfinite().all() for key, value in tensors.items())
    assert 0 < same(before, after) < float("inf")


@pytest.mark.parametrize("name", CASES)
def test_a_package_trains_as_under_plain_lightning(tmp_path, name):
    """One client, one round of two epochs: weights and buffers are lightning.Trainer's, bit for bit."""
    (left, dataset, options), (right, again, _) = make(name), make(name)
    precision, bound = PARITY.get(name, ("32-true", 0.0))
    data = Dealt(dataset, 1, **options)
    data.setup("fit")
    package = lightning.pytorch if isinstance(left, LightningModule) else pytest.importorskip("pytorch_lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = package.Trainer(**LIGHTNING, precision=precision, default_root_dir=tmp_path)
        validation = {"val_dataloaders": data.pooled_dataloader("val")} if options.get("val_fraction") else {}
        trainer.limit_val_batches = 1.0 if validation else 0  # a module's own validation would draw random numbers
        trainer.callbacks.append(package.callbacks.LambdaCallback(on_train_start=seed_client))
        trainer.fit(left, train_dataloaders=data.client_train_dataloader(client=0, round=1, seed=0), **validation)
    federated = FederatedTrainer(
        precision=precision, max_rounds=1, local_epochs=2, default_root_dir=tmp_path, **SETTINGS
    )
    federated.fit(right, Dealt(again, 1, **options), FedAvg())
    difference = same(left.state_dict(), right.state_dict())
    print(f"{name}: largest difference {difference:g} in {precision}")
    assert difference <= bound
