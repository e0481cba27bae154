"""The variants of MNIST by which the Fed+ paper compares personalised methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedbc_lightning.core import seeding
from fedbc_lightning.core.checks import check_at_least, check_finite, check_share
from fedbc_lightning.data import ArrayDataset, LoadedData
from fedbc_lightning.partition import IID, Partition

from .vision import MNISTDataModule

NUM_DIGITS = 10
NUM_NOISY_CLASSES = 2


class MNISTRobustDataModule(MNISTDataModule):
    """MNIST-robust of the Fed+ paper (section 5.1): some clients see negatives.

    All 70,000 images are dealt out at random in equal parts; a part of the clients, drawn at random, has its images
    turned to ``255 - pixel``, in training and test data alike. Each client's data are split 50/50. The paper's setting:
    N = 10 with 10 % or N = 50 with 20 % of negatives, logistic regression, batches of 20, lr 0.02, σ = 15 (Fed+'s
    penalty), 20 local steps, 500 rounds of 10 clients, mean over 5 seeds.

    The paper leaves open whether the equal parts are random and whether MNIST's own test images take part, how negated
    clients are chosen, and how pixels are scaled: negatives are normalised as all others are, by the mean and standard
    deviation of MNIST (a negative's mean is then about 2.4).

    Args:
        root: Folder that holds, or will hold, ``MNIST/raw``.
        num_clients: N, at least 1; 10 or 50 in the paper.
        negated_fraction: Share of the clients with negatives, in [0, 1]; None: as in the paper, 0.2 for N = 50, else
            0.1. Rounded to whole clients, but at least one where the share is above 0.
        test_fraction: Of each client's samples that are its test data, in (0, 1).
        download: Fetch the files if they are missing (11 MB).
        **kwargs: Of :class:`~fedbc_lightning.datamodules.MNISTDataModule`.

    Attributes:
        negated_clients: Who has negatives, int64, ascending; there after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, or as of :class:`~fedbc_lightning.datamodules.MNISTDataModule`.
    """

    negated_clients: np.ndarray
    other_way = ""

    def __init__(
        self,
        root: str = "data",
        num_clients: int = 10,
        negated_fraction: float | None = None,
        test_fraction: float = 0.5,
        download: bool = True,
        **kwargs: Any,
    ) -> None:
        if negated_fraction is None:
            negated_fraction = 0.2 if num_clients == 50 else 0.1
        check_share("data.negated_fraction", negated_fraction, closed=True)
        super().__init__(root, IID(num_clients), download, test="split", test_fraction=test_fraction, **kwargs)
        self.negated_fraction = negated_fraction

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """The images, those of negated clients turned."""
        rng = seeding.numpy_generator(self.split_seed, "negate")
        count = max(round(self.negated_fraction * len(partition)), int(self.negated_fraction > 0))
        self.negated_clients = np.sort(rng.choice(len(partition), count, replace=False))
        images, labels = _tensors(data)
        rows = partition.indices[np.isin(partition.client_of_each(), self.negated_clients)]
        images[torch.from_numpy(rows)] = 255 - images[torch.from_numpy(rows)]
        return ArrayDataset((images, labels), transform=self.transform, augment=self.augment)


class MNISTPersonalDataModule(MNISTRobustDataModule):
    """MNIST-personal of the Fed+ paper (section 5.1): negatives as in MNIST-robust, and each client its own noise.

    For every client two classes are drawn at random; their images get Laplace noise in each pixel, in training and test
    data alike, drawn once per image (not per batch), and not clipped to what a pixel can show. All else, and what the
    paper leaves open, is that of :class:`MNISTRobustDataModule`; open here, too, are the scale of the noise and that
    the two classes are random.

    Images are held as int16, in units of 1/255: noisy ones leave 0..255, and float32 would take twice the memory (110
    MB for all). Noise is thus rounded to whole units, and pixels end at 128 times white. torchvision takes int16 for a
    wider range of brightness, so there is no ``augment`` and ``transform`` here.

    Args:
        root: Folder that holds, or will hold, ``MNIST/raw``.
        num_clients: N, at least 1; 10 or 50 in the paper.
        noise_scale: Of the Laplace distribution (its mean absolute value), for pixels in [0, 1], at least 0.
        negated_fraction: As of :class:`MNISTRobustDataModule`.
        test_fraction: Of each client's samples that are its test data, in (0, 1).
        download: Fetch the files if they are missing (11 MB).
        **kwargs: Of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        negated_clients: Who has negatives, int64, ascending; there after ``setup``.
        noisy_classes: The two noisy classes of each client, int64 ``(N, 2)``, ascending; there after ``setup``.

    Raises:
        ConfigurationError: As of :class:`MNISTRobustDataModule`.
    """

    noisy_classes: np.ndarray

    def __init__(
        self,
        root: str = "data",
        num_clients: int = 10,
        noise_scale: float = 0.5,
        negated_fraction: float | None = None,
        test_fraction: float = 0.5,
        download: bool = True,
        **kwargs: Any,
    ) -> None:
        check_at_least("data.noise_scale", noise_scale, 0)
        check_finite("data.noise_scale", noise_scale)
        super().__init__(
            root, num_clients, negated_fraction, test_fraction, download, augment=False, transform=None, **kwargs
        )
        self.noise_scale = noise_scale

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """The images, those of negated clients turned, those of noisy classes with noise."""
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
