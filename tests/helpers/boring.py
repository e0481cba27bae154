"""The smallest data and module that exercise everything: six unequal clients, BatchNorm, accuracy."""

import csv
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedbc_lightning import FederatedDataModule, FederatedTrainer

NUM_CLIENTS = 6


class BoringData(FederatedDataModule):
    """Client i has 20 + 30 i samples of its own linear rule; the first 80 % train."""

    num_clients = NUM_CLIENTS

    def __init__(self, batch_size: int = 16, **kwargs: Any) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        generator = torch.Generator().manual_seed(0)
        self.arrays = []
        for client in range(NUM_CLIENTS):
            rule = torch.randn(10, 3, generator=generator)
            inputs = torch.randn(20 + 30 * client, 10, generator=generator)
            self.arrays.append((inputs, (inputs @ rule).argmax(1)))

    def client_train_dataset(self, client: int) -> TensorDataset:
        inputs, targets = self.arrays[client]
        cut = int(0.8 * len(inputs))
        return TensorDataset(inputs[:cut], targets[:cut])

    def client_test_dataset(self, client: int) -> TensorDataset:
        inputs, targets = self.arrays[client]
        cut = int(0.8 * len(inputs))
        return TensorDataset(inputs[cut:], targets[cut:])


class Hidden(Dataset):
    """Hides what kind of data set it holds, so that a DataLoader must read it."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class BoringModel(LightningModule):
    """A linear layer, BatchNorm and another one."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self(inputs), targets)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.log("test_loss", functional.cross_entropy(outputs, targets))
        self.log("test_accuracy", (outputs.argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams["lr"], momentum=0.5)


class Linear(BoringModel):
    """A linear layer alone: there are no buffers, so both engines train it."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.net = nn.Linear(10, 3)


class Plain(LightningModule):
    """A step that is a function of weights and batch, and logs its accuracy; it has no buffers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.log("train_accuracy", (outputs.argmax(1) == batch[1]).float().mean())
        return functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class NamedData(BoringData):
    """Its clients have names."""

    client_names = ("ann", "bob", "cyd", "dan", "eve", "fay")


def make_model(model_class: type[BoringModel] = BoringModel, **kwargs: Any) -> BoringModel:
    """A module with the same initial weights every time."""
    torch.manual_seed(0)
    return model_class(**kwargs)


def make_trainer(root: Path, **kwargs: Any) -> FederatedTrainer:
    """A quiet trainer: 3 rounds of 3 clients."""
    settings: dict[str, Any] = {
        "max_rounds": 3, "clients_per_round": 3, "accelerator": "cpu", "default_root_dir": root, "logger": False,
        "enable_progress_bar": False, "seed": 1,
    }  # fmt: skip
    return FederatedTrainer(**{**settings, **kwargs})


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with Path(path).open() as file:
        return list(csv.DictReader(file))


def without_times(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of a table but for the columns that a clock fills."""
    return [{name: row[name] for name in row if not str(name).startswith(("time/", "seconds"))} for row in rows]


def assert_equal_trees(left: Any, right: Any, path: str = "") -> None:
    """Two nested containers of tensors and values, bit for bit."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_equal_trees(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for k, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_equal_trees(a, b, f"{path}/{k}")
    else:
        assert left == right, path
