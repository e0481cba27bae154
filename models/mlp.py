"""A perceptron with one hidden layer."""

from __future__ import annotations

from torch import nn

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive

from .classifier import Classifier


class MLP(Classifier):
    """A perceptron with one hidden layer, ReLU and dropout: by default 784-128-10, the MNIST model of FedBC's code.

    Args:
        num_features: Length of a flattened input (784 in MNIST, 64 in Digits).
        hidden: Width of the hidden layer.
        num_classes: Number of classes.
        dropout: Probability of dropping a hidden unit in training, in [0, 1).
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    Example:
        >>> import torch
        >>> MLP()(torch.zeros(4, 1, 28, 28)).shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        num_features: Count = 784,
        hidden: Count = 128,
        num_classes: Count = 10,
        dropout: Fraction = 0.5,
        lr: Positive = 0.01,
        momentum: Fraction = 0.0,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        self.network = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_features, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
