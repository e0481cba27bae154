"""Modules and data for what is rare: losses that are missing, negative or not finite, dropout, odd optimizers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from helpers.quadratics import QuadraticData, QuadraticModule, sample_quadratics
from helpers.user_modules import CLASSES, FEATURES


class OptimizedModule(QuadraticModule):
    """A quadratic with an optimizer of the test's choice, and an L2 term in its loss.

    Args:
        make: ``module -> optimizer``.
        l2: Adds l2/2 |w|^2 to the loss.
    """

    def __init__(self, make: Callable[[QuadraticModule], Any], l2: float = 0.0) -> None:
        super().__init__()
        self.make, self.l2 = make, l2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.l2 / 2 * (self.head.square().sum() + self.tail.square().sum()) if self.l2 else loss

    def configure_optimizers(self) -> Any:
        return self.make(self)


class AlteredModule(QuadraticModule):
    """A quadratic whose loss a function changes.

    Args:
        alter: ``(module, loss, batch_idx) -> loss or None``; reads ``module.trainer`` for round and client.
        **options: Of :class:`QuadraticModule`.
    """

    def __init__(self, alter: Callable[[Any, Tensor, int], Tensor | None], **options: Any) -> None:
        super().__init__(**options)
        self.alter, self.start = alter, torch.empty(0)
        self.num_steps: Counter[tuple[int, int]] = Counter()

    def on_train_epoch_start(self) -> None:
        self.start = self.point()

    def point(self) -> Tensor:
        return torch.cat([self.head, self.tail]).detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training:
            self.num_steps[self.trainer.current_round, self.trainer.current_client] += 1
        return self.alter(self, super().training_step(batch, batch_idx), batch_idx)


class DropoutClassifier(LightningModule):
    """Dropout, and BatchNorm whose running statistics are plain means: they depend on the count of batches."""

    def __init__(self, lr: float = 0.1, has_norm: bool = True) -> None:
        super().__init__()
        self.lr = lr
        norm = nn.BatchNorm1d(16, momentum=None) if has_norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), norm, nn.Softplus(), nn.Dropout(0.5), nn.Linear(16, CLASSES))
        self.backward_calls = 0

    def on_before_backward(self, loss: Tensor) -> None:
        self.backward_calls += 1

    def on_after_backward(self) -> None:
        self.backward_calls += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self.net(inputs), targets)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        for k, name in enumerate(("running_mean", "running_var")):
            if isinstance(self.net[1], nn.BatchNorm1d):
                self.log(f"test_statistics{k}", getattr(self.net[1], name).double().sum(), batch_size=len(batch[1]))
        self.log("test_size", float(len(batch[1])), batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class NoisyData(QuadraticData):
    """Random augmentation on the way to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        matrices, centres = batch
        return [matrices, centres + torch.randn_like(centres)]


def clients_with_nan(client: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """The default quadratics, one of them without a finite loss."""
    clients = sample_quadratics()
    clients[client][1][0, 0] = np.nan
    return clients
