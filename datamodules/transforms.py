"""Functions of whole batches of images, on their device: random augmentations for training, and transforms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from fedbc_lightning.core import seeding
from fedbc_lightning.core.checks import Count, UnitInterval, checked
from fedbc_lightning.core.errors import ConfigurationError, in_one_line

CPU = torch.device("cpu")


# Data of several clients are joined in memory if their transforms are equal, so these are compared by their numbers.
class Scale(nn.Module):
    """Converts uint8 pixels to float32 and multiplies them by a factor; instances with the same factor are equal.

    Args:
        factor: Factor of the pixels, e.g. 1/255 for values in [0, 1].
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` is a Scale by the same factor, so that data sets with both may be joined."""
        return type(other) is Scale and other.factor == self.factor

    def __hash__(self) -> int:
        """Return the hash of the factor."""
        return hash((Scale, self.factor))

    def forward(self, images: Tensor) -> Tensor:
        """Convert images ``(B, ...)`` from uint8 to float32."""
        return images.to(torch.float32).mul_(self.factor)


class Normalize(nn.Module):
    """Converts pixels in 0..255 to float32, subtracts a mean and divides by a standard deviation, per channel.

    Instances with the same mean and standard deviation are equal.

    Args:
        mean: Mean of each of the C channels, for pixels in [0, 1].
        std: Standard deviation of each of the C channels, for pixels in [0, 1]; above 0.

    Example:
        >>> Normalize([0.5], [0.5])(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)).flatten().tolist()
        [-1.0, 1.0]
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean, self.std = tuple(mean), tuple(std)
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` is a Normalize by the same numbers, so that data sets with both may be joined."""
        return type(other) is Normalize and (other.mean, other.std) == (self.mean, self.std)

    def __hash__(self) -> int:
        """Return the hash of mean and standard deviation."""
        return hash((Normalize, self.mean, self.std))

    def forward(self, images: Tensor) -> Tensor:
        """Convert images ``(B, C, H, W)`` from integers to normalised float32."""
        if images.device not in self._on:
            mean, std = (torch.tensor(value, device=images.device).view(-1, 1, 1) for value in (self.mean, self.std))
            # In units of pixels, so that a batch needs one subtraction and one division, both in place
            self._on[images.device] = mean * 255, std * 255
        mean, std = self._on[images.device]
        return images.to(torch.float32).sub_(mean).div_(std)


class WholeBatch(nn.Module):
    """Applies a deterministic transform of torchvision to whole batches.

    Args:
        transform: Transform of images ``(B, C, H, W)``; if it marks tensors as images (``v2.ToImage``), they are turned
            into ordinary tensors again.
    """

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor) -> Tensor:
        """Apply the transform to images ``(B, C, H, W)``, uint8."""
        return self.transform(images).as_subclass(Tensor)


class BatchAugmentation(nn.Module, ABC):
    """Base class of augmentations, which change each image of a training batch by a random draw of its own."""

    @abstractmethod
    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """Change a batch of images.

        Args:
            images: Images ``(B, C, H, W)`` of the data set's type, mostly uint8; they must not be changed in place.
            generator: CPU generator of all draws.

        Returns:
            Changed images of the same type.
        """


@checked("augment")
class RandomCrop(BatchAugmentation):
    """Moves each image by a random offset and pads it with zeros, as torchvision's RandomCrop, but in whole batches.

    Args:
        padding: Number of pixels added at each side before the crop to the old size, at least 1; 4 is usual for
            CIFAR-10.
    """

    def __init__(self, padding: Count) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """Move images ``(B, C, H, W)`` by offsets ``(2, B)``, which are drawn from the CPU generator."""
        height, width = images.shape[-2:]
        padded = functional.pad(images, (self.padding,) * 4)
        # Drawn on the CPU, so that a run on a GPU moves each image by the same offset
        offsets = torch.randint(2 * self.padding + 1, (2, len(images)), generator=generator)
        rows, columns = offsets.to(images.device, non_blocking=True)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, 2p+1, 2p+1, H, W), a view
        return windows[torch.arange(len(images), device=images.device), :, rows, columns]


@checked("augment")
class RandomHorizontalFlip(BatchAugmentation):
    """Mirrors each image, left to right, with some probability, as torchvision's class, but in whole batches.

    Args:
        probability: Probability that an image is mirrored, in [0, 1].
    """

    def __init__(self, probability: UnitInterval = 0.5) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """Mirror some of the images ``(B, C, H, W)``; ``(B,)`` numbers are drawn from the CPU generator."""
        # Drawn on the CPU, so that a run on a GPU mirrors the same images
        mirrored = torch.rand(len(images), generator=generator) < self.probability
        return torch.where(mirrored.to(images.device).view(-1, 1, 1, 1), images.flip(-1), images)


class EachImage(BatchAugmentation):
    """Applies a random transform of torchvision to each image of a batch, with draws from the given generator alone.

    Transforms of ``torchvision.transforms.v2`` draw once per call, from torch's global generator. This class calls them
    image by image, with the global generators seeded from the given one and restored afterwards. That takes more time:
    for 32 images of CIFAR-10, torchvision's crop and flip take 1.8 ms of one CPU core, :class:`RandomCrop` and
    :class:`RandomHorizontalFlip` 0.24 ms.

    Args:
        transform: Transform of one image ``(C, H, W)``, uint8, that returns an image.
    """

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """Transform images ``(B, C, H, W)`` one by one; a single seed is drawn from the CPU generator."""
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        with seeding.preserved_globals(images.device):
            seeding.seed_globals(seed, images.device)
            return torch.stack([self.transform(image) for image in images])


class Compose(BatchAugmentation):
    """Applies one augmentation after the other.

    Args:
        transforms: Augmentations of this module, or random transforms of ``torchvision.transforms.v2``, which are
            wrapped in :class:`EachImage`.

    Example:
        >>> both = Compose([RandomCrop(4), RandomHorizontalFlip()])
        >>> both(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.Generator()).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(self, transforms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.transforms = nn.ModuleList(t if isinstance(t, BatchAugmentation) else EachImage(t) for t in transforms)

    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        """Apply all augmentations to images ``(B, C, H, W)``."""
        for transform in self.transforms:
            images = transform(images, generator)
        return images


def as_augment(augment: bool | nn.Module, usual: BatchAugmentation) -> BatchAugmentation | None:
    """Return the augmentation that a data module's argument ``augment`` asks for, or None for none.

    Args:
        augment: Whether to use the usual augmentation, or another augmentation or random transform.
        usual: Usual augmentation of the data set.
    """
    if isinstance(augment, bool):
        return usual if augment else None
    return augment if isinstance(augment, BatchAugmentation) else EachImage(augment)


def try_transform(inputs: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a transform to a few inputs ``(B, ...)``, to see whether it can be used.

    Raises:
        ConfigurationError: The transform fails, or it is random, so that inputs would differ between evaluations.
    """
    with seeding.preserved_globals(CPU):
        state = torch.get_rng_state()
        outputs = _try("transform", transform, inputs)
        if not torch.equal(state, torch.get_rng_state()):
            raise ConfigurationError("data.transform: it draws random numbers; give what is random as data.augment")
    return outputs


def check_transforms(images: Tensor, transform: Callable[[Tensor], Tensor], augment: BatchAugmentation | None) -> None:
    """Try transform and augmentation on a few images, so that mistakes are found before training.

    Args:
        images: A few images of the data set, ``(B, C, H, W)``.
        transform: Transform of every batch.
        augment: Augmentation of training batches, or None.

    Raises:
        ConfigurationError: One of them fails, the augmentation changes the type of images, or the transform is random
            (images would differ between evaluations) or returns integers.
    """
    if augment is not None:
        with seeding.preserved_globals(CPU):
            augmented = _try("augment", partial(augment, generator=Generator().manual_seed(0)), images)
        if augmented.dtype != images.dtype:  # what makes floats belongs into data.transform, which comes after it
            raise ConfigurationError(f"data.augment: made {augmented.dtype} of {images.dtype}; it must keep the type")
    if not try_transform(images, transform).is_floating_point():
        raise ConfigurationError(
            "data.transform: it returns integers; end with torchvision.transforms.v2.ToDtype(torch.float32, scale=True)"
        )


def _try(name: str, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    given = f"{str(inputs.dtype).removeprefix('torch.')} {tuple(inputs.shape)}"
    with in_one_line(f"data.{name}: it fails on {given}: "):
        outputs = function(inputs)
    if not isinstance(outputs, Tensor) or len(outputs) != len(inputs):
        raise ConfigurationError(f"data.{name}: made a {type(outputs).__name__} of {given}; return one for each sample")
    return outputs
