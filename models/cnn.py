"""The small convolutional network of the FedBC paper."""

from __future__ import annotations

from torch import Tensor, nn

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError

from .base import check_images
from .classifier import Classifier


class CIFARCNN(Classifier):
    """The CIFAR-10 model of the FedBC paper with 62,006 parameters: two convolutions and three linear layers.

    The layers are a convolution to 6 channels (kernel 5), pooling, a convolution to 16 channels (kernel 5), pooling,
    and linear layers of 120, 84 and ``num_classes`` units, with ReLU between them.

    Args:
        in_channels: Number of channels of an image.
        image_size: Height and width of an image in pixels, at least 16.
        num_classes: Number of classes.
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    Raises:
        ConfigurationError: ``image_size`` is below 16, so that nothing is left after two convolutions and poolings.

    Example:
        >>> import torch
        >>> CIFARCNN()(torch.zeros(4, 3, 32, 32)).shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        in_channels: Count = 3,
        image_size: Count = 32,
        num_classes: Count = 10,
        lr: Positive = 0.01,
        momentum: Fraction = 0.0,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        if image_size < 16:
            raise ConfigurationError(
                f"model.image_size={image_size} is too small for CIFARCNN: give 16 or more, or use MLP"
            )
        # A kernel of 5 takes off 4 pixels and pooling halves: 32, 28, 14, 10, 5, so the paper's 16 * 5 * 5 = 400
        # features.
        side = ((image_size - 4) // 2 - 4) // 2
        self.network = nn.Sequential(
            *(nn.Conv2d(in_channels, 6, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(16 * side * side, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, num_classes),
        )

    def check_inputs(self, inputs: Tensor) -> None:
        """Check dtype and shape of the inputs.

        Raises:
            ConfigurationError: The inputs are not float images ``(B, in_channels, image_size, image_size)``.
        """
        super().check_inputs(inputs)
        check_images(inputs, self.hparams["in_channels"], self.hparams["image_size"])
