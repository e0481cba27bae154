"""The variants of MNIST with which the Fed+ paper compares personalised methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedbc_lightning.core import seeding
from fedbc_lightning.core.checks import FINITE, at_least, check_arguments, within
from fedbc_lightning.data import ArrayDataset, LoadedData
from fedbc_lightning.partition import IID, Partition

from .vision import MNISTDataModule

NUM_DIGITS = 10
NUM_NOISY_CLASSES = 2


class MNISTRobustDataModule(MNISTDataModule):
    """MNIST-robust of the Fed+ paper (section 5.1), in which some clients have negatives.

    All 70,000 images are assigned at random in equal parts. A part of the clients, drawn at random, has its images
    turned into ``255 - pixel``, in training and test data alike. Each client's data are split 50/50. The paper uses
    N = 10 with 10 % or N = 50 with 20 % of negatives, logistic regression, batches of 20, lr 0.02, σ = 15 (Fed+'s
    penalty), 20 local steps, 500 rounds of 10 clients, and the mean over 5 seeds.

    The paper does not say whether the equal parts are random, whether MNIST's own test images take part, how negated
    clients are chosen, and how pixels are scaled. Here negatives are normalised like all other images, by the mean and
    standard deviation of MNIST (the mean of a negative is then about 2.4).

    Args:
        root: Folder that holds, or will hold, ``MNIST/raw``.
        num_clients: Number of clients N, at least 1; 10 or 50 in the paper.
        negated_fraction: Fraction of the clients with negatives, in [0, 1], rounded to whole clients, but at least one
            if the fraction is above 0. None is the paper's: 0.2 for N = 50, else 0.1.
        test_fraction: Fraction of each client's samples that are its test data, in (0, 1).
        download: Whether to download the files if they are missing (11 MB).
        **kwargs: Arguments of :class:`~fedbc_lightning.datamodules.MNISTDataModule`.

    Attributes:
        negated_clients: Clients with negatives, int64, ascending; available after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, or :class:`~fedbc_lightning.datamodules.MNISTDataModule` cannot
            get its files.
    """

    negated_clients: np.ndarray
    other_way = ""

    def __init__(
        self,
        root: str | Path = "data",
        num_clients: Annotated[int, at_least(1)] = 10,
        negated_fraction: Annotated[float, within(0, 1)] | None = None,
        test_fraction: float = 0.5,
        download: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(MNISTRobustDataModule, locals(), "data")
        if negated_fraction is None:
            # Fed+, section 5.1: 10 % of 10 clients, 20 % of 50
            negated_fraction = 0.2 if num_clients == 50 else 0.1
        super().__init__(root, IID(num_clients), download, test="split", test_fraction=test_fraction, **kwargs)
        self.negated_fraction = negated_fraction

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """Return the images, with those of negated clients turned into negatives."""
        rng = seeding.numpy_generator(self.split_seed, "negate")
        count = max(round(self.negated_fraction * len(partition)), int(self.negated_fraction > 0))
        self.negated_clients = np.sort(rng.choice(len(partition), count, replace=False))
        images, labels = _tensors(data)
        rows = partition.indices[np.isin(partition.client_of_each(), self.negated_clients)]
        images[torch.from_numpy(rows)] = 255 - images[torch.from_numpy(rows)]
        return ArrayDataset((images, labels), transform=self.transform, augment=self.augment)


class MNISTPersonalDataModule(MNISTRobustDataModule):
    """MNIST-personal of the Fed+ paper (section 5.1), with the negatives of MNIST-robust and noise at each client.

    For every client two classes are drawn at random. Each pixel of their images gets Laplace noise, in training and
    test data alike; it is drawn once per image (not per batch), and not clipped to the range of pixels. Everything else
    is as in :class:`MNISTRobustDataModule`. The paper leaves open the points named there, and also the scale of the
    noise and whether the two classes are random.

    Images are held as int16, in units of 1/255, because noisy ones leave 0..255 and float32 would take twice the memory
    (110 MB for all). Noise is therefore rounded to whole units, and the largest pixel is 128 times white. torchvision
    interprets int16 as a wider range of brightness, so this class has no ``augment`` and ``transform``.

    Args:
        root: Folder that holds, or will hold, ``MNIST/raw``.
        num_clients: Number of clients N, at least 1; 10 or 50 in the paper.
        noise_scale: Scale of the Laplace distribution (its mean absolute value), for pixels in [0, 1], at least 0.
        negated_fraction: Fraction of the clients with negatives, in [0, 1], rounded to whole clients, but at least one
            if the fraction is above 0. None is the paper's: 0.2 for N = 50, else 0.1.
        test_fraction: Fraction of each client's samples that are its test data, in (0, 1).
        download: Whether to download the files if they are missing (11 MB).
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        negated_clients: Clients with negatives, int64, ascending; available after ``setup``.
        noisy_classes: The two noisy classes of each client, int64 ``(N, 2)``, ascending; available after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, or the files are missing or damaged.
    """

    noisy_classes: np.ndarray

    def __init__(
        self,
        root: str | Path = "data",
        num_clients: Annotated[int, at_least(1)] = 10,
        noise_scale: Annotated[float, at_least(0), FINITE] = 0.5,
        negated_fraction: float | None = None,
        test_fraction: float = 0.5,
        download: bool = True,
        **kwargs: Any,
    ) -> None:
        check_arguments(MNISTPersonalDataModule, locals(), "data")
        super().__init__(
            root, num_clients, negated_fraction, test_fraction, download, augment=False, transform=None, **kwargs
        )
        self.noise_scale = noise_scale

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """Return the images, with those of negated clients turned into negatives, and noise on the noisy classes."""
        data.dataset = super().alter(data, partition)
        rng = seeding.numpy_generator(self.split_seed, "noise")
        drawn = [rng.choice(NUM_DIGITS, NUM_NOISY_CLASSES, replace=False) for _ in range(len(partition))]
        self.noisy_classes = np.sort(drawn, axis=1)
        pixels, labels = _tensors(data)
        images = pixels.to(torch.int16)
        noisy = self.noisy_classes[partition.client_of_each()] == labels.numpy()[partition.indices, None]
        for rows in torch.from_numpy(partition.indices[noisy.any(axis=1)]).split(1024):
            noise = np.rint(rng.laplace(0, 255 * self.noise_scale, (len(rows), *images.shape[1:])))
            images[rows] = (images[rows] + torch.from_numpy(noise)).clamp(-(2**15), 2**15 - 1).to(torch.int16)
        return ArrayDataset((images, labels), transform=self.transform)


def _tensors(data: LoadedData) -> tuple[Tensor, Tensor]:
    assert isinstance(data.dataset, ArrayDataset)
    images, labels = data.dataset.pool.tensors
    return images, labels
