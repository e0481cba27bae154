"""Every ready model, small, with data that it can train on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedbc_lightning import FederatedDataModule, models

SIZES = (7, 10)


def floats(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: torch.randn(n, *shape, generator=generator)


def integers(below: int, *shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: torch.randint(0, below, (n, *shape), generator=generator)


@dataclass(frozen=True)
class ModelCase:
    """One model and how its inputs and targets are drawn."""

    name: str
    model_class: type[LightningModule]
    arguments: dict[str, Any]
    inputs: Callable[[int, torch.Generator], Tensor]
    targets: Callable[[int, torch.Generator], Tensor]
    metric: str = "accuracy"

    def model(self, **arguments: Any) -> Any:
        """The same weights in every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.model_class(**{**self.arguments, **arguments})

    def data(self, num_samples: int = 10, seed: int = 0) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        return TensorDataset(self.inputs(num_samples, generator), self.targets(num_samples, generator))

    def loader(self) -> DataLoader:
        """Batches of 4, 4 and 2."""
        return DataLoader(self.data(), batch_size=4)


SMALL, IMAGE = {"num_features": 5}, floats(1, 4, 4)
TEXT = {"vocabulary_size": 7, "hidden": 12}
TWEETS = {"vocabulary_size": 9, "embedding_dim": 4, "hidden": 12}
CASES = [
    ModelCase("logistic", models.LogisticRegression, {**SMALL, "num_classes": 3}, floats(5), integers(3)),
    ModelCase(
        "logistic on images", models.LogisticRegression, {"num_features": 16, "num_classes": 3}, IMAGE, integers(3)
    ),
    ModelCase("binary logistic", models.BinaryLogisticRegression, SMALL, floats(5), integers(2)),
    ModelCase("linear", models.LinearRegression, SMALL, floats(5), floats(), "rmse"),
    ModelCase("linear on a column", models.LinearRegression, SMALL, floats(5), floats(1), "rmse"),
    ModelCase(
        "mlp", models.MLP, {"num_features": 16, "hidden": 8, "num_classes": 3, "dropout": 0.0}, IMAGE, integers(3)
    ),
    ModelCase("cifar cnn", models.CIFARCNN, {"in_channels": 1, "image_size": 20}, floats(1, 20, 20), integers(3)),
    ModelCase("femnist cnn", models.FEMNISTCNN, {"num_classes": 3, "hidden": 16}, floats(1, 28, 28), integers(3)),
    ModelCase("resnet", models.ResNet18GroupNorm, {"num_classes": 3}, floats(3, 8, 8), integers(3)),
    ModelCase("next character", models.CharLSTM, TEXT, integers(7, 6), integers(7)),
    ModelCase("all characters", models.CharLSTM, TEXT, integers(7, 6), integers(7, 6)),
    ModelCase("sent140", models.Sent140LSTM, TWEETS, integers(9, 5), integers(2)),
]


class ClientsOf(FederatedDataModule):
    """Two clients of unequal size."""

    num_clients = len(SIZES)

    def __init__(self, case: ModelCase, **kwargs: Any) -> None:
        super().__init__(batch_size=4, eval_batch_size=3, **kwargs)
        self.case = case

    def client_train_dataset(self, client: int) -> TensorDataset:
        return self.case.data(SIZES[client], seed=client)

    def client_test_dataset(self, client: int) -> TensorDataset:
        return self.case.data(SIZES[client] - 3, seed=10 + client)


def plain_trainer(root: Any, **options: Any) -> Trainer:
    """A quiet lightning.Trainer on the CPU."""
    settings: dict[str, Any] = {
        "max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": root, "log_every_n_steps": 1,
    }  # fmt: skip
    return Trainer(**{**settings, **options})
