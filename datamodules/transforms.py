"""What is done to whole batches of images, on their device: random changes in training, and their way to the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from fedbc_lightning.core import seeding
from fedbc_lightning.core.checks import check_at_least, check_share
from fedbc_lightning.core.errors import ConfigurationError, first_line

CPU = torch.device("cpu")


class Scale(nn.Module):
    """uint8 pixels times a factor, as float32. Two of one factor are equal.

    Args:
        factor: E.g. 1/255, for pixels in [0, 1].
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        """Whether it is a Scale by the same factor, so that data of both may be joined."""
        return type(other) is Scale and other.factor == self.factor

    def __hash__(self) -> int:
        """Of the factor."""
        return hash((Scale, self.factor))

    def forward(self, images: Tensor) -> Tensor:
        """``(B, ...)`` uint8 -> float32."""
        return images.to(torch.float32).mul_(self.factor)


class Normalize(nn.Module):
    """Pixels in 0..255 to float32, with the given mean subtracted and standard deviation divided out, per channel.

    Two of one mean and standard deviation are equal.

    Args:
        mean: Of each channel, for pixels in [0, 1]; length C.
        std: Likewise, above 0.

    Example:
        >>> Normalize([0.5], [0.5])(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)).flatten().tolist()
        [-1.0, 1.0]
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.std = tuple(mean), tuple(std)
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __eq__(self, other: object) -> bool:
        """Whether it is a Normalize by the same numbers, so that data of both may be joined."""
        return type(other) is Normalize and (other.mean, other.std) == (self.mean, self.std)

    def __hash__(self) -> int:
        """Of the numbers."""
        return hash((Normalize, self.mean, self.std))

    def forward(self, images: Tensor) -> Tensor:
        """``(B, C, H, W)``, integers -> float32."""
        if images.device not in self._on:
            mean, std = (torch.tensor(value, device=images.device).view(-1, 1, 1) for value in (self.mean, self.std))
            self._on[images.device] = mean * 255, std * 255
        mean, std = self._on[images.device]
        return images.to(torch.float32).sub_(mean).div_(std)


class WholeBatch(nn.Module):
    """A deterministic transform of torchvision, for whole batches.

    Args:
        transform: Takes ``(B, C, H, W)``; what it marks as images (``v2.ToImage``) comes out as ordinary tensors.
    """

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor) -> Tensor:
        """``(B, C, H, W)`` uint8 -> what the transform gives."""
        return self.transform(images).as_subclass(Tensor)


class BatchAugmentation(nn.Module, ABC):
    """Changes each image of a training batch by a draw of its own; a subclass gives ``forward``."""

    @abstractmethod
    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """Change a batch.

        Args:
            images: ``(B, C, H, W)``, uint8 as they are held; not to be written to.
            generator: Of the CPU; everything is drawn from it.

        Returns:
            Images of the same type.
        """


class RandomCrop(BatchAugmentation):
    """Each image is moved by its own random offset and padded with zeros: torchvision's RandomCrop, for whole batches.

    Args:
        padding: Pixels added at each side before the crop to the old size, at least 1; 4 for CIFAR-10.
    """

    def __init__(self, padding: int) -> None:
        super().__init__()
        check_at_least("padding", padding, 1, whole=True)
        self.padding = padding

    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """``(B, C, H, W)`` -> the same shape; offsets ``(2, B)`` are drawn from the CPU generator."""
        height, width = images.shape[-2:]
        padded = functional.pad(images, (self.padding,) * 4)
        offsets = torch.randint(2 * self.padding + 1, (2, len(images)), generator=generator)
        rows, columns = offsets.to(images.device, non_blocking=True)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2p+1, 2p+1, H, W), a view
        return windows[torch.arange(len(images), device=images.device), :, rows, columns]


class RandomHorizontalFlip(BatchAugmentation):
    """Each image is mirrored, left to right, with some probability: torchvision's, for whole batches.

    Args:
        probability: That an image is mirrored, in [0, 1].
    """

    def __init__(self, probability: float = 0.5) -> None:
        super().__init__()
        check_share("probability", probability, closed=True)
        self.probability = probability

    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """``(B, C, H, W)`` -> the same shape; ``(B,)`` numbers are drawn from the CPU generator."""
        mirrored = torch.rand(len(images), generator=generator) < self.probability
        return torch.where(mirrored.to(images.device).view(-1, 1, 1, 1), images.flip(-1), images)


class EachImage(BatchAugmentation):
    """A random transform of torchvision, made to draw for each image of a batch, and from the given generator alone.

    Transforms of ``torchvision.transforms.v2`` draw once per call and from torch's global generator. This one is called
    image by image, with the global generators seeded from the given one and put back afterwards. It costs more: for 32
    images of CIFAR-10, crop and flip take 1.8 ms of one CPU core, those above 0.24 ms.

    Args:
        transform: Takes an image ``(C, H, W)``, uint8, and returns one.
    """

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """``(B, C, H, W)`` -> images of the same type; one seed is drawn from the CPU generator."""
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        with seeding.preserved_globals(images.device):
            seeding.seed_globals(seed, images.device)
            return torch.stack([self.transform(image) for image in images])


class Compose(BatchAugmentation):
    """One augmentation after the other.

    Args:
        transforms: Ours, or random transforms of ``torchvision.transforms.v2``, which :class:`EachImage` then wraps.

    Example:
        >>> both = Compose([RandomCrop(4), RandomHorizontalFlip()])
        >>> both(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.Generator()).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(self, transforms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(t if isinstance(t, BatchAugmentation) else EachImage(t) for t in transforms)

    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """``(B, C, H, W)`` -> images of the same type."""
        for transform in self.transforms:
            images = transform(images, generator)
        return images


def as_augment(augment: bool | nn.Module, usual: BatchAugmentation) -> BatchAugmentation | None:
    """What a data module does to training batches.

    Args:
        augment: As given to it: whether to use the usual augmentation, or another one.
        usual: Of the data set.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(augment, bool):
        return usual if augment else None
    if not isinstance(augment, nn.Module):
        raise _unusable("augment", augment, "true, false")
    return augment if isinstance(augment, BatchAugmentation) else EachImage(augment)


def as_transform(transform: nn.Module | None, usual: nn.Module) -> nn.Module:
    """What a data module does to every batch: the transform given to it, else the usual one of the data set.

    Raises:
        ConfigurationError: It is no transform.
    """
    if transform is None:
        return usual
    if not isinstance(transform, nn.Module):
        raise _unusable("transform", transform, "null")
    return WholeBatch(transform)


def try_transform(inputs: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """What a transform makes of a few inputs ``(B, ...)``.

    Raises:
        ConfigurationError: It fails, or is random: inputs would then differ between evaluations.
    """
    with seeding.preserved_globals(CPU):
        state = torch.get_rng_state()
        outputs = _try("transform", transform, inputs)
        if not torch.equal(state, torch.get_rng_state()):
            raise ConfigurationError("data.transform: it draws random numbers; give what is random as data.augment")
    return outputs


def check_transforms(images: Tensor, transform: nn.Module, augment: BatchAugmentation | None) -> None:
    """Try transform and augmentation on a few images, so that what cannot work is said before training.

    Args:
        images: ``(B, C, H, W)``, as they are held.
        transform: Of every batch.
        augment: Of training batches.

    Raises:
        ConfigurationError: One of them fails; the augmentation changes the type of images; the transform is random
            (images would then differ between evaluations) or gives integers.
    """
    with seeding.preserved_globals(CPU):
        if augment is not None:
            augmented = _try("augment", partial(augment, generator=Generator().manual_seed(0)), images)
            if augmented.dtype != images.dtype or len(augmented) != len(images):
                raise ConfigurationError(
                    f"data.augment: made {_describe(augmented)} of {_describe(images)}; it must keep their type: leave "
                    "what makes floats to data.transform, which comes after it"
                )
    outputs = try_transform(images, transform)
    if not outputs.is_floating_point() or len(outputs) != len(images):
        raise ConfigurationError(
            f"data.transform: made {_describe(outputs)} of {_describe(images)}; end with e.g. "
            "torchvision.transforms.v2.ToDtype(torch.float32, scale=True)"
        )


def _try(name: str, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    try:
        outputs = function(images)
    except Exception as error:
        raise ConfigurationError(f"data.{name}: it fails on {_describe(images)}: {first_line(error)}") from error
    if not isinstance(outputs, Tensor):
        raise ConfigurationError(f"data.{name}: made a {type(outputs).__name__} of {_describe(images)}; return images")
    return outputs


def _unusable(name: str, given: object, others: str) -> ConfigurationError:
    kind = f"{type(given).__module__}.{type(given).__qualname__}"
    return ConfigurationError(f"data.{name}: got a {kind}; give {others} or a transform of torchvision.transforms.v2")


def _describe(images: Tensor) -> str:
    return f"{str(images.dtype).removeprefix('torch.')} images {tuple(images.shape)}"
