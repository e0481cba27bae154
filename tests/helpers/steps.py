"""Modules whose steps an engine may take in another way, and runs that are to come to the same bits."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fedbc_lightning import FedAvg, FederatedTrainer
from fedbc_lightning.federation.checkpoint_content import module_state_of, state_of
from helpers.boring import BoringData, BoringModel, make_trainer

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5),
    "maximize": lambda p: torch.optim.SGD(p, torch.tensor(0.01), momentum=0.5, dampening=0.1, maximize=True),
    "groups": lambda p: torch.optim.RMSprop([{"params": p[:1]}, {"params": p[1:3], "lr": 0.05}], 0.01),
}


class Smooth(BoringModel):
    """No buffers; logs a number and a mean with a batch size of its own."""

    def __init__(self, optimizer: str = "momentum") -> None:
        super().__init__()
        self.kind = optimizer
        self.net = nn.Sequential(nn.Linear(10, 8), self.make_middle(), nn.Linear(8, 3))

    def make_middle(self) -> nn.Module:
        return nn.Tanh()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(batch[0])
        self.log("train_size", 0.1 * len(batch[1]))
        self.log_dict({"train_accuracy": (outputs.argmax(1) == batch[1]).float().mean()}, batch_size=3)
        return functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.kind](list(self.parameters()))


class Dropping(Smooth):
    def make_middle(self) -> nn.Module:
        return nn.Dropout(0.5)


class Recurrent(Smooth):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(10, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)[0]


class Branching(Smooth):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 1.1 else loss * 2


class Measuring(Smooth):
    """Updates a Metric in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.accuracy(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class Centering(Smooth):
    """Makes a buffer that does not travel of its first batch; ``is_placed`` gives it a place before."""

    def __init__(self, is_placed: bool = False) -> None:
        super().__init__()
        if is_placed:
            self.register_buffer("center", None, persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if getattr(self, "center", None) is None:
            self.register_buffer("center", batch[0].mean(0), persistent=False)
        return super().training_step([batch[0] - self.center, batch[1]], batch_idx)


class LogsTheMost(Smooth):
    """Logs what is no mean, and returns its loss in a dict."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_most", batch[0].max(), reduce_fx="max")
        return {"loss": super().training_step(batch, batch_idx)}


class Listed(Smooth):
    """Its penalty reaches the weights through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = [self.net[0].weight]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0.05 * self.decayed[0].square().sum()


class Images(BoringData):
    def client_train_dataset(self, client: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(client)
        labels = torch.randint(3, (20 + 10 * client,), generator=generator)
        return TensorDataset(torch.randn(len(labels), 3, 16, 16, generator=generator), labels)

    def client_test_dataset(self, client: int) -> None:
        return None


def fit(root: Path, model: Any, algorithm: Any = FedAvg, data: Any = BoringData, ckpt_path: Any = None, **options: Any
) -> FederatedTrainer:  # fmt: skip
    """A run of what these make, without evaluations."""
    torch.manual_seed(0)
    trainer = make_trainer(root, **{"eval_every_n_rounds": 0, "max_rounds": 2, "local_epochs": 2} | options)
    trainer.fit(model(), data(), algorithm(), ckpt_path=ckpt_path)
    return trainer


def assert_same_run(one: FederatedTrainer, other: FederatedTrainer) -> None:
    """The state and the table of clients of two runs are the same, bit for bit."""
    states = [state_of(trainer.federation) | module_state_of(trainer.federation) for trainer in (one, other)]
    for state in states:
        state.pop("fingerprint")
        state.pop("set_by_hooks", None)
    torch.testing.assert_close(*states, rtol=0, atol=0, equal_nan=True)
    tables = [Path(str(trainer.log_dir), "clients.csv").read_text() for trainer in (one, other)]
    assert tables[0] == tables[1]
