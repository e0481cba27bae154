"""A perceptron with one hidden layer and batch normalisation."""

from __future__ import annotations

from torch import nn

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive

from .classifier import Classifier


class BatchNormMLP(Classifier):
    """A perceptron with one hidden layer, batch normalisation and ReLU, a small model for FedBN.

    Args:
        num_features: Length of a flattened input (784 in MNIST, 64 in Digits).
        hidden: Width of the hidden layer.
        num_classes: Number of classes.
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    Example:
        >>> import torch
        >>> BatchNormMLP()(torch.zeros(4, 1, 28, 28)).shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        num_features: Count = 784,
        hidden: Count = 128,
        num_classes: Count = 10,
        lr: Positive = 0.01,
        momentum: Fraction = 0.0,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        # FedBN keeps the BatchNorm1d at each client, with its running statistics.
        self.network = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_features, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )
