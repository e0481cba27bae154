"""Perceptrons with one hidden layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedbc_lightning.core.checks import Count, Fraction

from .base import Classifier


class MLP(Classifier):
    """A perceptron with one hidden layer, ReLU and dropout: by default 784-128-10, the MNIST model of FedBC's code.

    Args:
        num_features: Length of a flattened input (784 in MNIST, 64 in Digits).
        hidden: Width of the hidden layer.
        num_classes: Number of classes.
        dropout: Probability of dropping a hidden unit in training, in [0, 1).
        **kwargs: Arguments of :class:`Classifier`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

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
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.network = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_features, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )


class BatchNormMLP(Classifier):
    """A perceptron with one hidden layer, batch normalisation and ReLU, a small model for FedBN.

    Args:
        num_features: Length of a flattened input (784 in MNIST, 64 in Digits).
        hidden: Width of the hidden layer.
        num_classes: Number of classes.
        **kwargs: Arguments of :class:`Classifier`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

    Example:
        >>> import torch
        >>> BatchNormMLP()(torch.zeros(4, 1, 28, 28)).shape
        torch.Size([4, 10])
    """

    def __init__(self, num_features: Count = 784, hidden: Count = 128, num_classes: Count = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # FedBN keeps the BatchNorm1d at each client, with its running statistics.
        self.network = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_features, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )
