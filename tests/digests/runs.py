"""The module, the data and the trainer of the runs whose numbers are hashed: tiny, with unequal clients."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedbc_lightning import FederatedDataModule, FederatedTrainer

NUM_CLASSES = 3
TRAIN_SIZES = (10, 6, 15, 6, 11)
"""The registry's lists of one number per client have five entries; two clients take equally many steps."""
TEST_SIZES = (3, 4, 4, 2, 5)
"""Two clients have equally many test samples: the vectorized engine evaluates them together."""
ROUNDS = 3

TRAINER: dict[str, Any] = {
    "max_rounds": ROUNDS, "clients_per_round": 3, "local_epochs": 2, "seed": 3, "accelerator": "cpu", "devices": 1,
    "logger": False, "enable_progress_bar": False, "checkpoint_every_n_rounds": ROUNDS,
}  # fmt: skip
PRECISIONS = {torch.float32: "32-true", torch.float64: "64-true"}


class Data(FederatedDataModule):
    """Clients with normal inputs around a centre of their own, and labels by a linear rule of their own.

    Args:
        dtype: The type of the inputs.
        num_features: The length of an input.
        num_clients: The number of clients; from the sixth on, their sizes begin anew.
    """

    def __init__(self, dtype: torch.dtype, num_features: int, num_clients: int = len(TRAIN_SIZES)) -> None:
        super().__init__(batch_size=4)
        self.dtype, self.num_features = dtype, num_features
        self._num_clients = num_clients

    @property
    def num_clients(self) -> int:
        return self._num_clients

    def client_train_dataset(self, client: int) -> TensorDataset:
        inputs, targets = self._draw(client)
        size = TRAIN_SIZES[client % len(TRAIN_SIZES)]
        return TensorDataset(inputs[:size], targets[:size])

    def client_test_dataset(self, client: int) -> TensorDataset:
        inputs, targets = self._draw(client)
        size = TRAIN_SIZES[client % len(TRAIN_SIZES)]
        return TensorDataset(inputs[size:], targets[size:])

    def _draw(self, client: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + client)
        size = TRAIN_SIZES[client % len(TRAIN_SIZES)] + TEST_SIZES[client % len(TEST_SIZES)]
        draw = torch.randn(size + 1 + NUM_CLASSES, self.num_features, generator=generator, dtype=torch.float64)
        inputs = 2 * draw[:size] + draw[size]
        return inputs.to(self.dtype), (inputs @ draw[size + 1 :].T).argmax(1)


class Net(LightningModule):
    """Two layers, whose parameters ``head`` and ``tail`` are named by penalties of the registry, as is ``features``.

    Args:
        dtype: The type of the parameters.
        num_features: The length of an input.
        hidden: The width of the layer in between.
        batch_norm: Normalize the layer in between: buffers that training writes.
        dropout: Share of the layer in between that is dropped.
        adam: Train by Adam in place of SGD with momentum and weight decay.
        plain: Train by SGD without momentum and weight decay.
        schedule: The interval of an exponential decay of the learning rate; None: there is none.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        num_features: int = 6,
        hidden: int = 5,
        batch_norm: bool = False,
        dropout: float = 0.0,
        adam: bool = False,
        plain: bool = False,
        schedule: str | None = None,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        draw = torch.randn(num_features + NUM_CLASSES, hidden, generator=generator)
        self.head = torch.nn.Parameter(0.5 * draw[:num_features].to(dtype))
        self.tail = torch.nn.Parameter(0.5 * draw[num_features:].T.to(dtype).contiguous())
        self.norm = torch.nn.BatchNorm1d(hidden, dtype=dtype) if batch_norm else None
        self.features = torch.nn.Identity()
        self.dropout, self.schedule = dropout, schedule
        self.optimizer = (
            partial(torch.optim.Adam, lr=0.05, weight_decay=0.01)
            if adam
            else partial(torch.optim.SGD, lr=0.3, momentum=0.0 if plain else 0.5, weight_decay=0.0 if plain else 0.01)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(inputs @ self.head)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.dropout:
            hidden = functional.dropout(hidden, self.dropout, self.training)
        return self.features(hidden) @ self.tail

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = functional.cross_entropy(self(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.log("test_loss", functional.cross_entropy(outputs, targets))
        self.log("test_accuracy", (outputs.argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        if self.schedule is None:
            return optimizer
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": self.schedule}}


def train(
    root: Path,
    build: Callable[[], Any],
    dtype: torch.dtype,
    module: Mapping[str, Any],
    trainer: Mapping[str, Any],
    num_clients: int = len(TRAIN_SIZES),
    stops: tuple[int, ...] = (),
) -> Path:
    """Train for three rounds.

    Args:
        root: The folder to write to.
        build: Makes the algorithm.
        dtype: The type of weights and inputs.
        module: Arguments of :class:`Net`.
        trainer: Arguments of the trainer.
        num_clients: The number of clients.
        stops: The rounds at which the run ends and is resumed by a new trainer.

    Returns:
        The run folder.
    """
    options = TRAINER | {"precision": PRECISIONS[dtype]} | dict(trainer) | {"default_root_dir": str(root)}
    folder = ""
    for number, stop in enumerate((*stops, ROUNDS)):
        federated = FederatedTrainer(**options | {"max_rounds": stop})
        net = Net(dtype, **module)
        data = Data(dtype, len(net.head), num_clients)
        torch.manual_seed(0)
        federated.fit(net, data, build(), "last" if number else None)
        folder = str(federated.log_dir)
    return Path(folder)
