"""Base class of all regression models in this package: squared error, and its root over all samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torchmetrics import MeanSquaredError

from fedbc_lightning.core.checks import Fraction, NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError

from .base import SupervisedModel


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

    def _apply_to(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
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
