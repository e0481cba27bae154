"""LightningModules as people write them, tiny: none knows of federated learning, none may need a changed line.

The data is a three-class problem on eight features; :class:`UserData` federates it over unequal clients.
"""

from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedbc_lightning.data import FederatedDataModule

FEATURES, CLASSES = 8, 3


class UserData(FederatedDataModule):
    """Unequal clients of a noisy linear problem, held in memory.

    Args:
        sizes: Training samples per client.
        batch_size: Of training; the last batch of an epoch is short.
        test_size: Test samples per client, 0 for none.
    """

    def __init__(self, sizes: tuple[int, ...] = (23,), batch_size: int = 5, test_size: int = 0) -> None:
        super().__init__(batch_size=batch_size)
        self.sizes, self.test_size = sizes, test_size

    @property
    def num_clients(self) -> int:
        return len(self.sizes)

    def client_train_dataset(self, client: int) -> Dataset:
        return self._draw(client, self.sizes[client])

    def client_test_dataset(self, client: int) -> Dataset | None:
        return self._draw(1000 + client, self.test_size) if self.test_size else None

    def _draw(self, seed: int, size: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(size, FEATURES, generator=generator)
        mixing = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99))
        return TensorDataset(inputs, (inputs @ mixing).argmax(1))


class LitAutoEncoder(LightningModule):
    """The module of Lightning's first page."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, FEATURES))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class _Classifier(LightningModule):
    """What most of the classifiers here share."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneCycleClassifier(_Classifier):
    """A OneCycleLR per step, its length asked of the trainer."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("lr", self.lr_schedulers().get_last_lr()[0], on_step=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class MetricsClassifier(_Classifier):
    """torchmetrics objects logged as objects in every step, and one computed by hand at the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.train_f1 = torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro")
        self.train_auroc = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.train_f1.update(logits, y)
        self.train_auroc.update(loss.detach())
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        self.log_dict({"train_loss": loss, "margin": logits.max()}, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("train_f1", self.train_f1.compute())
        self.train_f1.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc)
        self.log("val_loss", functional.cross_entropy(logits, y))


class CollectionClassifier(_Classifier):
    """A MetricCollection, updated and logged as a whole, and a metric per class logged by hand."""

    def __init__(self) -> None:
        super().__init__()
        options = {"task": "multiclass", "num_classes": CLASSES, "average": "macro"}
        self.train_metrics = torchmetrics.MetricCollection(
            {
                "precision": torchmetrics.Precision(**options),
                "recall": torchmetrics.Recall(**options),
                "confidence": torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
            },
            prefix="train_",
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        self.train_metrics.update(logits.softmax(1), y)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(y))
        return loss


class BatchNormClassifier(_Classifier):
    """BatchNorm: float running statistics and the integer num_batches_tracked."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16, momentum=0.1), nn.ReLU(), nn.Linear(16, CLASSES)
        )


class AdamWGroupsClassifier(_Classifier):
    """No weight decay on biases: two groups, AdamW, LambdaLR per epoch in a scheduler dict."""

    def configure_optimizers(self):
        decay = [p for name, p in self.named_parameters() if name.endswith("weight")]
        no_decay = [p for name, p in self.named_parameters() if name.endswith("bias")]
        optimizer = torch.optim.AdamW(
            [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.1}], lr=0.01
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "frequency": 1, "name": "halving"},
        }


class HooksClassifier(_Classifier):
    """Appends to a list in its hooks, and logs gradient norms as Lightning's docs do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def training_step(self, batch, batch_idx):
        self.calls.append(("training_step", batch_idx))
        return super().training_step(batch, batch_idx)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.calls.append(("optimizer_zero_grad", epoch, batch_idx))
        optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer):
        self.calls.append(("on_before_optimizer_step", type(optimizer).__name__, self.global_step))
        self.log_dict(grad_norm(self.net, norm_type=2))

    def lr_scheduler_step(self, scheduler, metric):
        self.calls.append(("lr_scheduler_step", metric))
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class PlateauClassifier(_Classifier):
    """ReduceLROnPlateau on a training metric; patience 0 and a negative threshold: the rate falls after every epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="min", factor=0.5, patience=0, threshold=10.0, threshold_mode="abs"
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}


class DictClassifier(_Classifier):
    """Returns a dict, scales its loss by what it reads of itself and of the trainer."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        progress = (self.current_epoch + self.global_step / 10) / self.trainer.max_epochs
        scale = torch.tensor(1.0 + 0.1 * progress, device=self.device, dtype=self.dtype)
        logits = self(x)
        loss = scale * functional.cross_entropy(logits, y)
        self.log("train/acc", (logits.argmax(1) == y).float().mean())
        self.log("progress", float(progress))
        return {"loss": loss, "logits": logits.detach()}


class LBFGSClassifier(_Classifier):
    """An optimizer that calls its closure several times in one step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=5)


class WarmupClassifier(_Classifier):
    """The warm-up and the clipping override of Lightning's docs."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            lr_scale = min(1.0, float(self.trainer.global_step + 1) / 6.0)
            for pg in optimizer.param_groups:
                pg["lr"] = lr_scale * 0.1

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        if self.current_epoch > 0:
            gradient_clip_val = 0.05
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="norm")


class ThawingClassifier(_Classifier):
    """Fine-tuning: the first layer is trained from the second epoch on."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class FrozenBackboneClassifier(_Classifier):
    """Fine-tuning: a frozen first layer in a group of its own, BatchNorm kept in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.net[0].requires_grad_(False)
        self.register_buffer("class_weight", torch.tensor([1.0, 2.0, 0.5]))

    def on_train_epoch_start(self):
        self.net[1].eval()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self(x), y, weight=self.class_weight)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters(), "lr": 1e-4}, {"params": self.net[1:].parameters()}]
        return torch.optim.Adam(groups, lr=0.01)


class CountingSGD(torch.optim.SGD):
    """An optimizer of the user's own: keeps a count outside ``state`` and ``param_groups``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.3 / self.count
        return super().step(closure)


class OwnOptimizerClassifier(_Classifier):
    """Trains with :class:`CountingSGD`."""

    def configure_optimizers(self):
        return CountingSGD(self.parameters(), lr=0.3)


class ChattyClassifier(_Classifier):
    """Asks its trainer and itself what tutorials ask, prints, and logs with every flag there is."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        if batch_idx == 0:
            self.print("epoch", self.current_epoch, self.global_rank, self.local_rank)
        assert self.trainer.num_devices == 1
        assert not self.trainer.sanity_checking
        assert self.trainer.optimizers[0].param_groups[0]["lr"] == self.optimizers().param_groups[0]["lr"]
        self.log("train_loss", loss, True, None, None, None, "mean", sync_dist=True, rank_zero_only=False)
        self.log("train_peak", loss, on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("train_count", float(len(y)), on_epoch=True, reduce_fx="sum")
        if self.logger is not None:
            self.logger.log_metrics({"raw": loss.item()}, step=self.global_step)
        return loss


class SetupClassifier(_Classifier):
    """Builds its layers in setup, as modules do whose sizes come from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def setup(self, stage):
        with torch.random.fork_rng():
            torch.manual_seed(7 if self.net is None else 8)
            self.net = nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, CLASSES))


class TiedGenerator(_Classifier):
    """Tied weights, and a parameter that only every other batch gives a gradient to."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode.weight = self.encode.weight
        self.rare = nn.Parameter(torch.ones(CLASSES))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(self.decode(torch.tanh(self.encode(x))))
        if batch_idx % 2:
            logits = logits * self.rare
        loss = functional.cross_entropy(logits, y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


MODULES = (
    LitAutoEncoder, OneCycleClassifier, MetricsClassifier, CollectionClassifier, BatchNormClassifier,
    AdamWGroupsClassifier, HooksClassifier, PlateauClassifier, DictClassifier, LBFGSClassifier, WarmupClassifier,
    FrozenBackboneClassifier, OwnOptimizerClassifier, ChattyClassifier, SetupClassifier, TiedGenerator,
    ThawingClassifier,
)  # fmt: skip
LOGGED: dict[type[LightningModule], tuple[str, ...]] = {
    OneCycleClassifier: ("train/lr",),
    MetricsClassifier: ("train/acc", "train/f1", "train/margin"),
    CollectionClassifier: ("train/precision", "train/recall", "train/confidence"),
    HooksClassifier: ("train/grad_2.0_norm_total",),
    DictClassifier: ("train/acc", "train/progress"),
    ChattyClassifier: ("train/peak", "train/count"),
}
"""Columns that a module's own logging must give in metrics.csv, besides ``train/loss``."""
