"""LEAF's JSON files, and its FEMNIST: images of handwritten characters by writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.printing import shown_progress
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.data.datasets import Transform
from fedbc_lightning.partition import Natural, Partitioner

from .own_rows import readable
from .transforms import Scale

LAYOUT = "expected <path>/{train,test}/*.json, or <path>/*.json, or one file, as LEAF's preprocess.sh writes them"


@dataclass(frozen=True)
class LeafUser:
    """One user's samples with the values of the file.

    Attributes:
        name: Name of the user.
        inputs: Content of "x", one entry per sample.
        targets: Content of "y", of the same length.
        path: Path of the file.
    """

    name: str
    inputs: list
    targets: list
    path: Path

    def refuse(self, what: str) -> ConfigurationError:
        """Return an error that names the file and the user."""
        return ConfigurationError(f"data.path: '{self.path}', user '{self.name}': {what}")


Encode = Callable[[LeafUser], tuple[np.ndarray, np.ndarray]]
"""Function that converts a user's samples into compact arrays: inputs ``(n, ...)`` and targets ``(n, ...)``."""


def find_leaf_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the training files and the test files; without a folder ``train``, all files in ``path`` are for training.

    Raises:
        ConfigurationError: There are no training files.
    """
    if path.is_file():
        return [path], []
    folder = path / "train" if (path / "train").is_dir() else path
    train = sorted(folder.glob("*.json"))
    test = sorted((path / "test").glob("*.json")) if folder != path else []
    if not train:
        found = "no *.json files in it" if folder.is_dir() else "no such file or folder"
        raise ConfigurationError(f"data.path='{path}': {found}; {LAYOUT}")
    return train, test


def load_leaf(path: Path, encode: Encode, transform: Transform | None = None, classes: bool = True) -> LoadedData:
    """Read all files, and convert them user by user; a user in several files is one client.

    If the test files have the same users as the training files, they hold these clients' test data. If all their users
    are others (LEAF's split by user), they hold data that belong to no client.

    Args:
        path: Path of a folder or a file.
        encode: Function that converts a user's samples into arrays.
        transform: Transform of the inputs of a batch, or None.
        classes: Whether targets are classes, ``(n,)``.

    Raises:
        ConfigurationError: A file is missing, damaged or not of LEAF's form.
    """
    train_files, test_files = find_leaf_files(path)
    inputs, targets, clients, is_test = [], [], [], []
    numbers: dict[str, int] = {}
    for file in shown_progress([*train_files, *test_files], "reading LEAF files"):
        for user in read_users(file):
            x, y = encode(user)
            inputs.append(x)
            targets.append(y)
            clients.append(np.full(len(y), numbers.setdefault(user.name, len(numbers))))
            is_test.append(np.full(len(y), file in test_files))
    if not inputs:
        raise ConfigurationError(f"data.path='{path}': no user in its files has a sample")
    owner, tested = np.concatenate(clients), np.concatenate(is_test)
    tensors = torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(targets))
    labels = tensors[1].numpy() if classes else None
    data = LoadedData(ArrayDataset(tensors, transform=transform), labels, owner, list(numbers))
    return data.with_test(tested, is_shared=not np.intersect1d(owner[tested], owner[~tested]).size)


def read_users(path: Path) -> Iterator[LeafUser]:
    """Yield the users of one file in its order, without those that have no sample.

    Raises:
        ConfigurationError: The file cannot be read, is cut off or is not of LEAF's form; file and user are named.
    """
    with readable(path, "path", LAYOUT):
        users = json.loads(path.read_text(encoding="utf-8"))["user_data"]
    for name in list(users):
        samples = users.pop(name)  # as its arrays are much smaller than its Python objects
        user = LeafUser(name, samples.get("x", []), samples.get("y", []), path)
        if len(user.inputs) != len(user.targets):
            raise user.refuse(f"x has {len(user.inputs)} samples and y {len(user.targets)}; create it again")
        if user.targets:
            yield user


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
