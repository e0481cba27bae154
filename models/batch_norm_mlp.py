"""A perceptron with one hidden layer and batch normalisation."""

from __future__ import annotations

from torch import nn

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
        num_features: int = 784,
        hidden: int = 128,
        num_classes: int = 10,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        self.network = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_features, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )
