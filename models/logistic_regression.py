"""Multinomial logistic regression."""

from __future__ import annotations

from torch import nn

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive

from .classifier import Classifier


class LogisticRegression(Classifier):
    """One linear layer from features to class logits, the model of the Synthetic data.

    Its loss is convex in the parameters.

    Args:
        num_features: Length of a flattened input (60 in Synthetic, 784 in MNIST).
        num_classes: Number of classes.
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    Example:
        >>> import torch
        >>> LogisticRegression(num_features=60)(torch.zeros(4, 60)).shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        num_features: Count = 60,
        num_classes: Count = 10,
        lr: Positive = 0.01,
        momentum: Fraction = 0.0,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(num_features, num_classes))
