"""Base class of all models in this package: the steps, the logged loss, the optimizer and the checks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedbc_lightning.core.checks import Fraction, NotNegative, Positive, check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.recordable import recordable


class SupervisedModel(LightningModule):
    """LightningModule that learns targets from inputs with SGD, the base class of Classifier and Regressor.

    Batches are pairs ``(inputs, targets)``. The module logs ``train_loss``, ``val_loss`` and ``test_loss``; a subclass
    defines :meth:`loss` and, in :meth:`log_metrics`, further metrics of validation and test.
    It has no code for federated learning, and can also be trained with :class:`lightning.pytorch.Trainer`.

    Args:
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    Attributes:
        network: Module that maps a batch of inputs to outputs.

    Raises:
        ConfigurationError: An argument is impossible.
    """

    network: nn.Module

    def __init__(self, lr: Positive = 0.01, momentum: Fraction = 0.0, weight_decay: NotNegative = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()  # saves the arguments of the subclass, too
        check_arguments(type(self), self.hparams, "model")

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the outputs for a batch of float inputs.

        Raises:
            ConfigurationError: The inputs do not fit the model.
        """
        self.check_inputs(inputs)
        return self.network(inputs)

    def check_inputs(self, inputs: Tensor) -> None:
        """Check dtype and shape of the inputs; values are not read, as that would wait for the device.

        Raises:
            ConfigurationError: The inputs do not have the weights' dtype, or not ``num_features`` features.
        """
        dtype = next(self.parameters()).dtype
        if inputs.dtype != dtype and not _is_cast(inputs, dtype):
            raise ConfigurationError(
                f"model: {type(self).__name__} has weights of {_short(dtype)}, but the inputs are "
                f"{_short(inputs.dtype)}; convert them in the data, e.g. inputs.to({dtype})."
            )
        expected, found = self.hparams.get("num_features"), inputs.shape[1:].numel()
        if expected is not None and found != expected:
            raise ConfigurationError(f"model.num_features: got {expected}, but an input has {found}.")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(outputs, targets)")

    def log_metrics(self, prefix: str, outputs: Tensor, targets: Tensor) -> None:
        """Log further metrics of validation and test; this class logs none.

        Args:
            prefix: Prefix of the metrics' names, ``"val"`` or ``"test"``.
            outputs: Outputs for a batch.
            targets: Targets of the same batch.
        """

    @recordable
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch ``(inputs, targets)``, and log it as ``train_loss``."""
        outputs, targets = self._apply_to(batch)
        loss = self.loss(outputs, targets)
        self.log("train_loss", loss, batch_size=self._weight(targets))
        return loss

    @recordable
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and the metrics of :meth:`log_metrics`."""
        self._evaluate(batch, "val")

    @recordable
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_loss`` and the metrics of :meth:`log_metrics`."""
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with this module's hyper-parameters."""
        hparams = self.hparams
        return torch.optim.SGD(
            self.parameters(), lr=hparams["lr"], momentum=hparams["momentum"], weight_decay=hparams["weight_decay"]
        )

    def _evaluate(self, batch: tuple[Tensor, Tensor], prefix: str) -> None:
        outputs, targets = self._apply_to(batch)
        self.log(f"{prefix}_loss", self.loss(outputs, targets), batch_size=self._weight(targets))
        self.log_metrics(prefix, outputs, targets)

    def _apply_to(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the outputs for a batch and its targets, with one row per prediction."""
        inputs, targets = batch
        return self(inputs), targets

    def _weight(self, targets: Tensor) -> Any:
        """Return the number of predictions in a batch, by which Lightning weights its means among other batches."""
        return len(targets)


def check_images(inputs: Tensor, channels: int, size: int | None = None) -> None:
    """Check that inputs are images ``(B, channels, size, size)``; with ``size=None`` height and width are free.

    Raises:
        ConfigurationError: The inputs have another shape.
    """
    is_image = inputs.ndim == 4
    if is_image and inputs.shape[1] == channels and (size is None or inputs.shape[2:] == (size, size)):
        return
    side = "any height and width" if size is None else f"{size} x {size} pixels"
    found = f"{inputs.shape[1]} channels, {inputs.shape[2]} x {inputs.shape[3]}" if is_image else tuple(inputs.shape)
    raise ConfigurationError(f"model: expects images (B, {channels}, H, W) of {side}, but the batch has {found}.")


def _is_cast(inputs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether autocast gives inputs and weights the same dtype, as it does for all floats except float64."""
    return (
        torch.is_autocast_enabled(inputs.device.type)
        and inputs.is_floating_point()
        and torch.float64 not in (inputs.dtype, dtype)
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
