"""LEAF's FEMNIST, images of handwritten characters by writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedbc_lightning.data import IndexedDataModule, LoadedData
from fedbc_lightning.partition import Natural, Partitioner

from .leaf import LeafUser, find_leaf_files, load_leaf
from .transforms import Scale

SIZE = 28
NUM_CLASSES = 62


class FEMNISTDataModule(IndexedDataModule):
    """FEMNIST from LEAF's JSON files, where a client is a writer.

    The 62 classes are the digits, the upper-case and the lower-case letters. Inputs are float32 ``(B, 1, 28, 28)`` in
    [0, 1] (dark ink on white, as in the files; held as uint8), targets int64 ``(B,)``. The files come from LEAF's
    ``data/femnist/preprocess.sh``, e.g. with ``-s niid --sf 0.05 -k 0 -t sample``.

    Args:
        path: Path of a folder with ``train/*.json`` and ``test/*.json``, of a folder of ``*.json`` files, or of a file.
        partitioner: Partitioner that assigns images to clients; None is ``Natural()``, where a client is a writer.
        test_fraction: Fraction of each client's images that are its test data, in (0, 1). None uses ``test/*.json``, or
            0.2 if there are no such files. If the writers in the test files are not those in the training files, the
            test files evaluate the global model.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Raises:
        ConfigurationError: A file is missing, damaged or not of LEAF's form; the message names the file and the writer.
    """

    default_test_fraction: ClassVar[float | None] = 0.2

    def __init__(
        self,
        path: str | Path,
        partitioner: Partitioner | None = None,
        *,
        test_fraction: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partitioner or Natural(), test_fraction=test_fraction, **kwargs)
        self.path = Path(path).expanduser()

    def prepare_data(self) -> None:
        """Check that the files exist."""
        find_leaf_files(self.path)

    def load(self) -> LoadedData:
        """Return all writers' images, in the order of the files."""
        return load_leaf(self.path, encode_images, Scale(1 / 255))


def encode_images(user: LeafUser) -> tuple[np.ndarray, np.ndarray]:
    """Convert one writer's samples to images, uint8 ``(n, 1, 28, 28)``, and classes, int64 ``(n,)``.

    Raises:
        ConfigurationError: The samples are not lists of 784 numbers in [0, 1] with a class 0..61 each.
    """
    try:
        pixels = np.array(user.inputs, dtype=np.float32).reshape(-1, 1, SIZE, SIZE)
        classes = np.array(user.targets, dtype=np.int64).reshape(len(pixels))
        is_image = pixels.min() >= 0 and pixels.max() <= 1
        if not is_image or classes.min() < 0 or classes.max() >= NUM_CLASSES:
            raise ValueError(f"found pixels up to {pixels.max():g} and classes up to {classes.max()}")
    except (ValueError, TypeError, OverflowError) as error:
        raise user.refuse(
            f"its images are not lists of {SIZE * SIZE} numbers in [0, 1] with a class from 0 to {NUM_CLASSES - 1} "
            f"each ({error})"
        ) from None
    # Bytes take a quarter of the memory; LEAF divided the grey values by 255.
    return np.rint(pixels * 255).astype(np.uint8), classes
