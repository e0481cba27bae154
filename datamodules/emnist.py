"""EMNIST: handwritten digits and letters."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from torch import nn

from fedbc_lightning.core.checks import check_choice
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.partition import Partitioner

from .vision import IdxDataModule

Split = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]
NUM_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
CHUNK = 2**16  # images turned at a time


class EMNISTDataModule(IdxDataModule):
    """EMNIST (Cohen et al. 2017): grey images of handwritten characters, 28 x 28 pixels, in six splits.

    Inputs are float32 ``(B, 1, 28, 28)`` of mean about 0 and standard deviation about 1, targets int64 ``(B,)``. The
    files hold images with rows and columns swapped; here they stand upright.

    Classes of ``byclass`` (814,255 images) are 0-9 the digits, 10-35 the capital and 36-61 the lower-case letters;
    ``bymerge`` and ``balanced`` (131,600) have 47, alike letters merged; ``letters`` (145,600) has 26, both cases
    merged and counted from 0 here, from 1 in the file; ``digits`` (280,000) and ``mnist`` (70,000) have 10.

    Args:
        root: Folder that holds, or will hold, ``EMNIST/raw``.
        split: Which images and classes.
        classes: Keep these classes of the split only, relabelled 0, 1, ... in this order; None: all.
        partitioner: Which client has which images; None: ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Fetch the files if they are missing (0.6 GB for all splits; 1.8 GB more when unpacked).
        augment: Change the images of training batches: True moves each by up to 2 pixels; or as of
            :class:`~fedbc_lightning.datamodules.CIFAR10DataModule`.
        transform: As of :class:`~fedbc_lightning.datamodules.CIFAR10DataModule`.
        **kwargs: Of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Raises:
        ConfigurationError: A class is not one of the split, or the files are missing and cannot be downloaded, or one
            is damaged.

    Example:
        FEMNIST of Fed+: the lower-case letters a to j, five of them at each of 200 clients.

        >>> from fedbc_lightning.partition import ClassesPerClient
        >>> data = EMNISTDataModule(split="byclass", classes=[*range(36, 46)], partitioner=ClassesPerClient(200, 5))
        >>> data.num_clients
        200
    """

    dataset_name = "EMNIST"
    mean = (0.1736,)  # of byclass; the other splits differ by 0.002
    std = (0.3317,)

    def __init__(
        self,
        root: str = "data",
        split: Split = "byclass",
        classes: list[int] | None = None,
        partitioner: Partitioner | None = None,
        download: bool = True,
        augment: bool | nn.Module = False,
        transform: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        check_choice("data.split", split, tuple(NUM_CLASSES))
        count = NUM_CLASSES[split]
        self.split = split
        self.classes = list(range(count)) if classes is None else list(classes)
        if not self.classes or not set(self.classes) <= set(range(count)):
            raise ConfigurationError(f"data.classes={classes}: split {split} has the classes 0 to {count - 1}")
        if len(set(self.classes)) < len(self.classes):
            raise ConfigurationError(f"data.classes={classes}: give each class once")
        super().__init__(root, partitioner, download, augment, transform, **kwargs)
        self._first_label = 1 if split == "letters" else 0
        self.num_classes = self._first_label + count
        self.prefixes = (f"emnist-{split}-train", f"emnist-{split}-test")
        self.layout = (
            f"EMNIST/raw/emnist-{split}-{{train,test}}-{{images-idx3,labels-idx1}}-ubyte (or the same with .gz)"
        )

    def fetch(self) -> None:
        """Download by torchvision, which puts the files where they are looked for."""
        from torchvision import datasets  # takes a second to import

        datasets.EMNIST(self.root, self.split, download=True)

    def read(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Upright images of the kept classes, ``(M, 1, 28, 28)``, their new numbers, ``(M,)``, and how many train."""
        new_number = np.full(self.num_classes, -1)
        new_number[self._first_label + np.array(self.classes)] = np.arange(len(self.classes))
        parts = [(pixels, new_number[labels]) for pixels, labels in self._parts()]
        labels = np.concatenate([numbers[numbers >= 0] for _, numbers in parts])
        images = np.empty((len(labels), 1, 28, 28), dtype=np.uint8)
        start = 0
        for pixels, numbers in parts:
            kept = np.flatnonzero(numbers >= 0)
            for rows in np.split(kept, range(CHUNK, len(kept), CHUNK)):
                images[start : start + len(rows), 0] = pixels[rows].transpose(0, 2, 1)
                start += len(rows)
        return images, labels, int((parts[0][1] >= 0).sum())
