"""Scikit-learn's handwritten digits, which are real data that need no download."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import Partitioner, PowerLaw

from .transforms import Scale


class DigitsDataModule(IndexedDataModule):
    """1,797 grey images of 8 x 8 pixels in 10 classes (``sklearn.datasets.load_digits``), over 10 unequal clients.

    Inputs are float32 ``(B, 1, 8, 8)`` in [0, 1], targets int64 ``(B,)``.

    Args:
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(10, classes_per_client=2, exponent=1.2)``, with 10 clients of 68 to 354 images.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Example:
        >>> data = DigitsDataModule(seed=0)
        >>> data.setup()
        >>> int(data.num_samples("train").sum() + data.num_samples("test").sum())
        1797
    """

    def __init__(self, partitioner: Partitioner | None = None, **kwargs: Any) -> None:
        super().__init__(partitioner or PowerLaw(10, classes_per_client=2, exponent=1.2), **kwargs)

    def load(self) -> LoadedData:
        """Return the images as uint8 (pixel values 0..16), and their digits."""
        images, digits = read_digits()
        tensors = (torch.from_numpy(images).view(-1, 1, 8, 8), torch.from_numpy(digits))
        # A pixel counts the black dots of a block of 4 x 4, so it is 0..16.
        return LoadedData(ArrayDataset(tensors, transform=Scale(1 / 16)), digits)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 ``(1797, 64)``, and their digits, int64 ``(1797,)``.

    They are read from scikit-learn's file directly, because importing scikit-learn, which imports pandas, takes 0.6 s.
    If the file is not in its place, scikit-learn loads them.
    """
    path = Path(str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")))
    if path.is_file():
        table = np.loadtxt(path, delimiter=",", dtype=np.int64)
        return table[:, :-1].astype(np.uint8), table[:, -1].copy()  # a view would keep the whole table
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    return images.astype(np.uint8), digits
