"""ResNet-18 without batch statistics."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError

from .base import check_images
from .classifier import Classifier


class ResNet18GroupNorm(Classifier):
    """ResNet-18 for small images with GroupNorm, the CIFAR model of FedLi, with 11,173,962 parameters for 10 classes.

    It is torchvision's ResNet-18 with a 3 x 3 stem of stride 1 and without max-pooling, as is usual for 32 x 32 pixels.
    Group normalisation replaces batch normalisation, whose statistics of different clients do not average well (Hsieh
    et al. 2020). The default of two groups per layer is that of Reddi et al. 2021.

    Args:
        in_channels: Number of channels of an image.
        num_classes: Number of classes.
        num_groups: Number of groups into which each layer's channels are divided for normalisation, a divisor of 64.
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    Raises:
        ConfigurationError: An argument is impossible.

    References:
        K. Hsieh et al., The Non-IID Data Quagmire of Decentralized Machine Learning, ICML 2020;
        S. Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    Example:
        >>> import torch
        >>> ResNet18GroupNorm(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """

    def __init__(
        self,
        in_channels: Count = 3,
        num_classes: Count = 10,
        num_groups: Count = 2,
        lr: Positive = 0.01,
        momentum: Fraction = 0.0,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        from torchvision.models import resnet18  # takes a second to import

        super().__init__(lr, momentum, weight_decay)
        if 64 % num_groups:
            raise ConfigurationError(f"model.num_groups: got {num_groups}; it must divide 64, the fewest channels.")
        self.network = resnet18(num_classes=num_classes, norm_layer=partial(nn.GroupNorm, num_groups))
        stem = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision initialises its stem
        self.network.conv1 = stem
        self.network.maxpool = nn.Identity()

    def check_inputs(self, inputs: Tensor) -> None:
        """Check dtype and shape of the inputs.

        Raises:
            ConfigurationError: The inputs are not float images ``(B, in_channels, H, W)``.
        """
        super().check_inputs(inputs)
        check_images(inputs, self.hparams["in_channels"])
