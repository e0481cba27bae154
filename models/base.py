"""Base classes of all models in this package: steps, losses, metrics, the optimizer and the checks of a batch."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torchmetrics import MeanSquaredError

from fedbc_lightning.core.checks import Fraction, NotNegative, Positive, check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.recordable import recordable
from fedbc_lightning.core.text import shorten

# Inputs and targets, or outputs and targets
Batch = tuple[Tensor, Tensor]

# Target of a position that is not predicted; it is torch's default ignore_index
NOT_PREDICTED = -100


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
        image_shape: Channels, height and width of an input, None for any; None if inputs are no images.

    Raises:
        ConfigurationError: An argument is impossible.
    """

    network: nn.Module
    image_shape: tuple[int | None, ...] | None = None

    def __init__(self, lr: Positive = 0.01, momentum: Fraction = 0.0, weight_decay: NotNegative = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()  # saves the arguments of the subclass, too
        # The subclasses here pass these three on as **kwargs, so their own signatures do not bound them.
        for owner in (SupervisedModel, type(self)):
            check_arguments(owner, self.hparams, "model")

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the outputs for a batch of float inputs.

        Raises:
            ConfigurationError: The inputs do not fit the model.
        """
        self._check_shape(tuple(inputs.shape[1:]))
        return self.network(inputs)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless an input of this shape fits; values are not read, as that would wait for the device."""
        features, image = self.hparams.get("num_features"), self.image_shape
        if features is not None and features != math.prod(shape):
            raise ConfigurationError(f"model.num_features: got {features}, but an input has {math.prod(shape)}.")
        if image is None:
            return
        if len(shape) != 3 or any(size not in (None, found) for size, found in zip(image, shape, strict=True)):
            sizes = ", ".join("any" if size is None else str(size) for size in image)
            raise ConfigurationError(
                f"model: {type(self).__name__} takes images (channels, height, width) of ({sizes}), but an input has "
                f"the shape {shape}."
            )

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
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch ``(inputs, targets)``, and log it as ``train_loss``."""
        outputs, targets = self._apply_to(batch)
        loss = self.loss(outputs, targets)
        self.log("train_loss", loss, batch_size=self._weight(targets))
        return loss

    @recordable
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val_loss`` and the metrics of :meth:`log_metrics`."""
        self._evaluate(batch, "val")

    @recordable
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test_loss`` and the metrics of :meth:`log_metrics`."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the outputs for a batch, such as logits; its targets are not used."""
        return self._apply_to(batch)[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with this module's hyper-parameters."""
        hparams = self.hparams
        return torch.optim.SGD(
            self.parameters(), lr=hparams["lr"], momentum=hparams["momentum"], weight_decay=hparams["weight_decay"]
        )

    def _evaluate(self, batch: Batch, prefix: str) -> None:
        outputs, targets = self._apply_to(batch)
        self.log(f"{prefix}_loss", self.loss(outputs, targets), batch_size=self._weight(targets))
        self.log_metrics(prefix, outputs, targets)

    def _apply_to(self, batch: Batch) -> Batch:
        """Return the outputs for a batch and its targets, with one row per prediction."""
        inputs, targets = batch
        return self(inputs), targets

    def _weight(self, targets: Tensor) -> Any:
        """Return the number of predictions in a batch, by which Lightning weights its means among other batches."""
        return len(targets)


class Classifier(SupervisedModel):
    """LightningModule for classification with cross-entropy and SGD; a subclass only builds ``self.network``.

    It logs ``train_loss``, ``val_loss``, ``val_accuracy``, ``test_loss`` and ``test_accuracy`` (accuracy in [0, 1]).
    It has no code for federated learning, and can also be trained with :class:`lightning.pytorch.Trainer`.
    Inputs are float ``(B, ...)``, targets int64 ``(B,)`` with classes from 0.

    Args:
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    Attributes:
        network: Module that maps a batch of inputs ``(B, ...)`` to logits ``(B, num_classes)``.
        classes_argument: Name of the argument that is the number of classes.

    Raises:
        ConfigurationError: An argument is impossible.
    """

    classes_argument: ClassVar[str] = "num_classes"

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.hparams[self.classes_argument]

    def setup(self, stage: str) -> None:
        """Compare the number of classes with that of the data module's ``label_histogram``, if it has one.

        Raises:
            ConfigurationError: The data have more classes than the model.
        """
        # The data module of a plain lightning.Trainer may be anybody's, and need not count classes.
        data = getattr(self.trainer, "datamodule", None)
        histogram, names = getattr(data, "label_histogram", lambda: None)(), getattr(data, "class_names", None)
        if histogram is not None and histogram.shape[1] > self.num_classes:
            named = f" ({shorten(names)})" if names else ""
            raise self._too_few_classes(f"the data has {histogram.shape[1]} classes{named}")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits ``(B, num_classes)`` and targets ``(B,)``."""
        return F.cross_entropy(outputs, targets)

    def log_metrics(self, prefix: str, outputs: Tensor, targets: Tensor) -> None:
        """Log ``val_accuracy`` or ``test_accuracy``."""
        self.log(f"{prefix}_accuracy", self.accuracy(outputs, targets), batch_size=self._weight(targets))

    def accuracy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of targets whose logit is the largest, in [0, 1]."""
        return (outputs.argmax(dim=1) == targets).float().mean()

    def _too_few_classes(self, found: str) -> ConfigurationError:
        return ConfigurationError(f"model.{self.classes_argument}: got {self.num_classes}, but {found}.")


class NextToken(Classifier):
    """Classifier of the token that follows; losses and accuracy are means over the tokens that are predicted.

    Each predicted token of a client's data or of the pooled data counts once, whatever its sequence or batch. A target
    of -100 marks a position that is not predicted, such as padding after a shorter text.

    Args:
        lr: Step size, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty, >= 0.
    """

    classes_argument: ClassVar[str] = "vocabulary_size"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the predicted tokens.

        Args:
            outputs: Logits ``(n, vocabulary_size)``.
            targets: Tokens ``(n,)``, or -100 at positions that are not predicted.
        """
        # A batch of padding alone has a loss of 0, instead of 0 / 0.
        return F.cross_entropy(outputs, targets, reduction="sum") / self._weight(targets).clamp(min=1)

    def accuracy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of predicted tokens whose logit is the largest, in [0, 1]."""
        # argmax is never -100, so a position that is not predicted counts as no hit.
        return (outputs.argmax(dim=1) == targets).sum() / self._weight(targets).clamp(min=1)

    def _weight(self, targets: Tensor) -> Any:
        """Return the number of predicted tokens as a tensor; for an int, every step would wait for the device."""
        return (targets != NOT_PREDICTED).sum()


class Regressor(SupervisedModel):
    """LightningModule for regression with mean squared error and SGD; a subclass only builds ``self.network``.

    It logs ``train_loss``, ``val_loss``, ``val_rmse``, ``test_loss`` and ``test_rmse``. An rmse is the root of the mean
    squared error over all samples of an evaluation (a client's, or the pooled ones), not a mean of batches' roots.
    It has no code for federated learning, and can also be trained with :class:`lightning.pytorch.Trainer`.
    Inputs are float ``(B, ...)``, targets float ``(B,)`` or ``(B, 1)``.

    Args:
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    Attributes:
        network: Module that maps a batch of inputs ``(B, ...)`` to predictions ``(B, 1)``.

    Raises:
        ConfigurationError: An argument is impossible.
    """

    def __init__(self, lr: Positive = 0.01, momentum: Fraction = 0.0, weight_decay: NotNegative = 0.0) -> None:
        super().__init__(lr, momentum, weight_decay)
        self.val_rmse = MeanSquaredError(squared=False)
        self.test_rmse = MeanSquaredError(squared=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the predictions ``(B,)``.

        Raises:
            ConfigurationError: The inputs do not fit the model.
        """
        return super().forward(inputs).squeeze(1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error of predictions ``(B,)``."""
        return F.mse_loss(outputs, targets)

    def log_metrics(self, prefix: str, outputs: Tensor, targets: Tensor) -> None:
        """Log ``val_rmse`` or ``test_rmse``."""
        rmse = self.val_rmse if prefix == "val" else self.test_rmse
        rmse.update(outputs, targets)
        self.log(f"{prefix}_rmse", rmse, batch_size=len(targets))

    def _apply_to(self, batch: Batch) -> Batch:
        """Return predictions and targets ``(B,)`` in float32 or wider; squares in half precision lose most digits."""
        inputs, targets = batch
        outputs = self(inputs)
        if targets.shape not in (outputs.shape, (len(outputs), 1)):
            raise ConfigurationError(
                f"model: {type(self).__name__} takes one number per sample as target, ({len(outputs)},) or "
                f"({len(outputs)}, 1); the batch has {tuple(targets.shape)}."
            )
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        return outputs.to(dtype), targets.reshape(-1).to(dtype)
