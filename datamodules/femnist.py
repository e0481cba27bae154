"""LEAF's FEMNIST: handwritten characters by writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedbc_lightning.data import IndexedDataModule, LoadedData
from fedbc_lightning.partition import Natural, Partitioner

from .leaf import LeafUser, find_leaf_files, load_leaf
from .transforms import Scale

SIZE = 28
NUM_CLASSES = 62
DEFAULT_TEST_FRACTION = 0.2


class FEMNISTDataModule(IndexedDataModule):
    """FEMNIST from LEAF's JSON files: a client is a writer; 62 classes (digits, then upper-case, then lower-case).

    Inputs are float32 ``(B, 1, 28, 28)`` in [0, 1] (dark ink on white, as in the files; held as uint8), targets int64
    ``(B,)``. The files come from LEAF's ``data/femnist/preprocess.sh``, e.g. ``-s niid --sf 0.05 -k 0 -t sample``.

    Args:
        path: Folder with ``train/*.json`` and ``test/*.json``, folder of ``*.json`` files, or one file.
        partitioner: Which client has which images; None: ``Natural()``, the writers.
        test_fraction: Of each client's images that are its test data, in (0, 1); None: those of ``test/*.json``, else
            0.2. Where the test files hold other writers than the training files, they test the global model.
        **kwargs: Of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Raises:
        ConfigurationError: A file is missing, damaged or not of this form; the file and the writer are named.
    """

    def __init__(
        self,
        path: str,
        partitioner: Partitioner | None = None,
        *,
        test_fraction: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partitioner or Natural(), test_fraction=test_fraction, **kwargs)
        self.path = Path(path).expanduser()

    def prepare_data(self) -> None:
        """Check that the files are there."""
        find_leaf_files(self.path)

    def load(self) -> LoadedData:
        """All writers' images, in the order of the files."""
        data = load_leaf(self.path, encode_images, Scale(1 / 255))
        if data.is_test is None and data.shared_test is None and self.test_fraction is None:
            self.test_fraction = DEFAULT_TEST_FRACTION
        return data


def encode_images(user: LeafUser) -> tuple[np.ndarray, np.ndarray]:
    """One writer's images, uint8 ``(n, 1, 28, 28)``, and classes, int64 ``(n,)``.

    Raises:
        ConfigurationError: They are not lists of 784 numbers in [0, 1] and classes 0..61.
    """
    try:
        pixels = np.array(user.inputs, dtype=np.float32)
        classes = np.array(user.targets, dtype=np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise user.refuse(f"its images are not lists of {SIZE * SIZE} numbers with a class each ({error})") from None
    if pixels.shape != (len(user.inputs), SIZE * SIZE) or classes.ndim != 1:
        raise user.refuse(f"found images of shape {pixels.shape[1:]}; an image has {SIZE * SIZE} numbers")
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        raise user.refuse(f"pixels from {pixels.min():g} to {pixels.max():g}; they must lie in [0, 1]")
    if classes.min() < 0 or classes.max() >= NUM_CLASSES:
        raise user.refuse(f"classes from {classes.min()} to {classes.max()}; they must lie in 0..{NUM_CLASSES - 1}")
    return np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, SIZE, SIZE), classes
