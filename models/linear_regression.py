"""Linear regression."""

from __future__ import annotations

from torch import nn

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive

from .regressor import Regressor


class LinearRegression(Regressor):
    """One linear layer from features to a number, the model of Fed+'s synthetic regression (1,000 features).

    Its loss is convex in the parameters.

    Args:
        num_features: Length of a flattened input.
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    Example:
        >>> import torch
        >>> LinearRegression(num_features=60)(torch.zeros(4, 60)).shape
        torch.Size([4])
    """

    def __init__(
        self, num_features: Count = 1000, lr: Positive = 0.01, momentum: Fraction = 0.0, weight_decay: NotNegative = 0.0
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(num_features, 1))
