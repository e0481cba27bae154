"""EMNIST, images of handwritten digits and letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbc_lightning.core.checks import check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition import Partitioner

from .transforms import RandomCrop
from .vision import VisionDataModule

Split = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]
NUM_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


class EMNISTDataModule(VisionDataModule):
    """EMNIST (Cohen et al. 2017): grey images of handwritten characters, 28 x 28 pixels, in six splits.

    Inputs are float32 ``(B, 1, 28, 28)`` of mean about 0 and standard deviation about 1, targets int64 ``(B,)``. The
    files hold images with rows and columns swapped; this class turns them upright.

    The split ``byclass`` (814,255 images) has 62 classes: the digits (0-9), the capital letters (10-35) and the
    lower-case letters (36-61). ``bymerge`` (814,255) and ``balanced`` (131,600) have 47 classes, in which the two cases
    of similar letters are merged. ``letters`` (145,600) has 26 classes with both cases merged, counted from 0 here and
    from 1 in the file. ``digits`` (280,000) and ``mnist`` (70,000) have 10.

    Args:
        root: Folder that holds, or will hold, ``EMNIST/raw``.
        split: Split of EMNIST, which determines images and classes.
        classes: Classes of the split to keep, relabelled 0, 1, ... in this order; None keeps all.
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Whether to download the files if they are missing (0.6 GB for all splits; 1.8 GB more when unpacked).
        augment: Augmentation of training batches: True moves each image by up to 2 pixels, False changes none, and any
            augmentation of :class:`~fedbc_lightning.datamodules.CIFAR10DataModule` may be given.
        transform: Transform of every batch, see :class:`~fedbc_lightning.datamodules.CIFAR10DataModule`; None
            normalises.
        **kwargs: Further arguments of :class:`~fedbc_lightning.datamodules.CIFAR10DataModule`, such as ``test`` and
            ``batch_size``.

    Raises:
        ConfigurationError: A class is not one of the split, the files are missing and cannot be downloaded, or a file
            is damaged.

    Example:
        Fed+ makes its FEMNIST from the lower-case letters a to j, with five of them at each of 200 clients.

        >>> from fedbc_lightning.partition import ClassesPerClient
        >>> data = EMNISTDataModule(split="byclass", classes=[*range(36, 46)], partitioner=ClassesPerClient(200, 5))
        >>> data.num_clients
        200
    """

    dataset_name = "EMNIST"
    usual_augmentation = RandomCrop(padding=2)
    mean = (0.1736,)  # the mean of byclass; those of the other splits differ by 0.002
    std = (0.3317,)

    def __init__(
        self,
        root: str | Path = "data",
        split: Split = "byclass",
        classes: list[int] | None = None,
        partitioner: Partitioner | None = None,
        download: bool = True,
        augment: bool | nn.Module = False,
        transform: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(EMNISTDataModule, locals(), "data")
        super().__init__(root, partitioner, download, augment, transform, **kwargs)
        self.options = {"split": split}
        self.layout = f"EMNIST/raw/emnist-{split}-{{train,test}}-{{images-idx3,labels-idx1}}-ubyte"
        count = NUM_CLASSES[split]
        self.classes = list(range(count)) if classes is None else list(classes)
        kept = set(self.classes)
        if not kept or len(kept) < len(self.classes) or not kept <= set(range(count)):
            raise ConfigurationError(f"data.classes={classes}: give some of the classes 0 to {count - 1}, each once")

    def tensors(self, part: Any) -> tuple[Tensor, Tensor]:
        """Return upright images of the kept classes, uint8 ``(M, 1, 28, 28)``, and their new classes ``(M,)``."""
        # The files of this split alone count classes from 1; classes that are not kept become -1.
        first_label = 1 if self.options["split"] == "letters" else 0
        new_number = torch.full((first_label + NUM_CLASSES[self.options["split"]],), -1)
        new_number[first_label + torch.tensor(self.classes)] = torch.arange(len(self.classes))
        targets = new_number[part.targets]
        kept = targets >= 0
        # The files hold each image column by column.
        return part.data[kept].transpose(1, 2).contiguous()[:, None], targets[kept]
