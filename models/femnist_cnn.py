"""LEAF's convolutional network for federated EMNIST."""

from __future__ import annotations

from torch import Tensor, nn

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive

from .base import check_images
from .classifier import Classifier


class FEMNISTCNN(Classifier):
    """LEAF's FEMNIST model with 6,603,710 parameters, for grey images of 28 x 28 pixels.

    The layers are a convolution to 32 channels (kernel 5, same size), 2 x 2 pooling, a convolution to 64 channels
    (kernel 5, same size), 2 x 2 pooling, and linear layers of ``hidden`` and ``num_classes`` units, with ReLU between
    them. ``hidden=512, num_classes=10`` is the MNIST network of FedAvg's paper (McMahan et al. 2017; 1,663,370
    parameters). The CNN of Reddi et al. 2021 is a different one, with kernels of 3 and dropout.

    Args:
        num_classes: Number of classes (62: digits, capital and small letters).
        hidden: Width of the hidden layer.
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    References:
        S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018.

    Example:
        >>> import torch
        >>> FEMNISTCNN()(torch.zeros(4, 1, 28, 28)).shape
        torch.Size([4, 62])
    """

    def __init__(
        self,
        num_classes: Count = 62,
        hidden: Count = 2048,
        lr: Positive = 0.01,
        momentum: Fraction = 0.0,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        # Padding of 2 is TensorFlow's "same" for a kernel of 5, as in LEAF; pooling halves 28 pixels to 14 and to 7.
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 32, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(64 * 7 * 7, hidden), nn.ReLU()),
            nn.Linear(hidden, num_classes),
        )

    def check_inputs(self, inputs: Tensor) -> None:
        """Check dtype and shape of the inputs.

        Raises:
            ConfigurationError: The inputs are not float images ``(B, 1, 28, 28)``.
        """
        super().check_inputs(inputs)
        check_images(inputs, channels=1, size=28)
