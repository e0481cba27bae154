"""A module, its data, a callback and a logger of the package ``pytorch_lightning``, none of them changed."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from helpers.user_modules import CLASSES, FEATURES, UserData


class OtherClassifier(pl.LightningModule):
    """With hooks, hyper-parameters, a scheduler and values logged."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(FEATURES, CLASSES)
        self.ends = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", functional.cross_entropy(self.net(x), y))

    def on_before_optimizer_step(self, optimizer):
        assert self.optimizers() is not None
        self.ends += self.trainer.is_last_batch

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class OtherData(pl.LightningDataModule):
    """One client's samples, shuffled."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.size = size

    def train_dataloader(self):
        return DataLoader(UserData((self.size,)).client_train_dataset(0), batch_size=5, shuffle=True)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return 2 * x, y


class OtherCallback(pl.Callback):
    """Counts rounds and steps."""

    def __init__(self) -> None:
        self.rounds = self.steps = 0

    def on_round_end(self, trainer, pl_module):
        self.rounds += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1


class OtherLogger(CSVLogger):
    """Lightning's, by its other name."""
