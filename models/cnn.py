"""Convolutional networks for images."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from fedbc_lightning.core.checks import Count
from fedbc_lightning.core.errors import ConfigurationError

from .base import Classifier


class CIFARCNN(Classifier):
    """The CIFAR-10 model of the FedBC paper with 62,006 parameters: two convolutions and three linear layers.

    The layers are a convolution to 6 channels (kernel 5), pooling, a convolution to 16 channels (kernel 5), pooling,
    and linear layers of 120, 84 and ``num_classes`` units, with ReLU between them.

    Args:
        in_channels: Number of channels of an image.
        image_size: Height and width of an image in pixels, at least 16.
        num_classes: Number of classes.
        **kwargs: Arguments of :class:`Classifier`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

    Raises:
        ConfigurationError: ``image_size`` is below 16, so that nothing is left after two convolutions and poolings.

    Example:
        >>> import torch
        >>> CIFARCNN()(torch.zeros(4, 3, 32, 32)).shape
        torch.Size([4, 10])
    """

    def __init__(self, in_channels: Count = 3, image_size: Count = 32, num_classes: Count = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.image_shape = (in_channels, image_size, image_size)
        if image_size < 16:
            raise ConfigurationError(f"model.image_size={image_size} is too small: give 16 or more, or use MLP")
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


class FEMNISTCNN(Classifier):
    """LEAF's FEMNIST model with 6,603,710 parameters, for grey images of 28 x 28 pixels.

    The layers are a convolution to 32 channels (kernel 5, same size), 2 x 2 pooling, a convolution to 64 channels
    (kernel 5, same size), 2 x 2 pooling, and linear layers of ``hidden`` and ``num_classes`` units, with ReLU between
    them. ``hidden=512, num_classes=10`` is the MNIST network of FedAvg's paper (McMahan et al. 2017; 1,663,370
    parameters). The CNN of Reddi et al. 2021 is a different one, with kernels of 3 and dropout.

    Args:
        num_classes: Number of classes (62: digits, capital and small letters).
        hidden: Width of the hidden layer.
        **kwargs: Arguments of :class:`Classifier`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

    References:
        S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018.

    Example:
        >>> import torch
        >>> FEMNISTCNN()(torch.zeros(4, 1, 28, 28)).shape
        torch.Size([4, 62])
    """

    def __init__(self, num_classes: Count = 62, hidden: Count = 2048, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.image_shape = (1, 28, 28)
        # Padding of 2 is TensorFlow's "same" for a kernel of 5, as in LEAF; pooling halves 28 pixels to 14 and to 7.
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 32, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(64 * 7 * 7, hidden), nn.ReLU()),
            nn.Linear(hidden, num_classes),
        )


class ResNet18GroupNorm(Classifier):
    """ResNet-18 for small images with GroupNorm, the CIFAR model of FedLi, with 11,173,962 parameters for 10 classes.

    It is torchvision's ResNet-18 with a 3 x 3 stem of stride 1 and without max-pooling, as is usual for 32 x 32 pixels.
    Group normalisation replaces batch normalisation, whose statistics of different clients do not average well (Hsieh
    et al. 2020). The default of two groups per layer is that of Reddi et al. 2021.

    Args:
        in_channels: Number of channels of an image.
        num_classes: Number of classes.
        num_groups: Number of groups into which each layer's channels are divided for normalisation, a divisor of 64.
        **kwargs: Arguments of :class:`Classifier`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

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

    def __init__(self, in_channels: Count = 3, num_classes: Count = 10, num_groups: Count = 2, **kwargs: Any) -> None:
        from torchvision.models import resnet18  # takes a second to import

        super().__init__(**kwargs)
        self.image_shape = (in_channels, None, None)
        if 64 % num_groups:
            raise ConfigurationError(f"model.num_groups: got {num_groups}; it must divide 64, the fewest channels.")
        self.network = resnet18(num_classes=num_classes, norm_layer=partial(nn.GroupNorm, num_groups))
        stem = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision initialises its stem
        self.network.conv1 = stem
        self.network.maxpool = nn.Identity()
