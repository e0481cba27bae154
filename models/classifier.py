"""Base class of all classifiers in this package: cross-entropy, accuracy and the check of the classes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedbc_lightning.core.errors import ConfigurationError

from .base import SupervisedModel


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
        histogram = getattr(getattr(self.trainer, "datamodule", None), "label_histogram", lambda: None)()
        if histogram is not None and histogram.shape[1] > self.num_classes:
            raise self._too_few_classes(f"the data has {histogram.shape[1]} classes")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits ``(B, num_classes)`` and targets ``(B,)``.

        Raises:
            ConfigurationError: The targets are not one class of this model per sample.
        """
        return self._cross_entropy(outputs, targets, "mean")

    def log_metrics(self, prefix: str, outputs: Tensor, targets: Tensor) -> None:
        """Log ``val_accuracy`` or ``test_accuracy``."""
        self.log(f"{prefix}_accuracy", self.accuracy(outputs, targets), batch_size=self._weight(targets))

    def accuracy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of targets whose logit is the largest, in [0, 1]."""
        return (outputs.argmax(dim=1) == targets).float().mean()

    def _cross_entropy(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        try:
            return F.cross_entropy(logits, targets, reduction=reduction)
        except IndexError as error:  # raised on the CPU only; a GPU stops with an assertion of its own
            # -100 is the ignore_index of torch's cross-entropy, and no class.
            known = targets[targets != -100]
            worst = int(known.max()) if int(known.min()) >= 0 else int(known.min())
            raise self._too_few_classes(f"a target is {worst}; classes are 0..{self.num_classes - 1}") from error
        except (RuntimeError, ValueError) as error:
            if targets.shape == logits.shape[:1] and targets.dtype in (torch.int64, torch.uint8):
                raise
            raise ConfigurationError(
                f"model: {type(self).__name__} takes one class per sample as target, int64 of shape "
                f"({len(logits)},); the batch has {str(targets.dtype).removeprefix('torch.')} of shape "
                f"{tuple(targets.shape)}."
            ) from error

    def _too_few_classes(self, found: str) -> ConfigurationError:
        return ConfigurationError(f"model.{self.classes_argument}: got {self.num_classes}, but {found}.")
