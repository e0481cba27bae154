"""Reading of LEAF's JSON files.

A file holds ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.printing import shown_progress
from fedbc_lightning.data import ArrayDataset, LoadedData
from fedbc_lightning.data.datasets import Transform

from .own_rows import readable

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
    if test_files and not np.intersect1d(owner[tested], owner[~tested]).size:
        return data.with_shared_test(tested)
    data.is_test = tested if test_files else None
    return data


def read_users(path: Path) -> Iterator[LeafUser]:
    """Yield the users of one file in its order, without those that have no sample.

    Raises:
        ConfigurationError: The file cannot be read, is cut off or is not of LEAF's form; file and user are named.
    """
    # What 'users' and 'num_samples' say is compared with the samples: it shows that a file was cut off or edited.
    with readable(path, "path", LAYOUT):
        content = json.loads(path.read_text(encoding="utf-8"))
        users = content["user_data"]
        if sorted(users) != sorted(content["users"]):
            raise ValueError("'users' are not those of 'user_data'")
        sizes = dict(zip(content["users"], content["num_samples"], strict=True))
    for name in list(users):
        samples = users.pop(name)  # as its arrays are much smaller than its Python objects
        user = LeafUser(name, samples.get("x", []), samples.get("y", []), path)
        if not len(user.inputs) == len(user.targets) == sizes[name]:
            raise user.refuse(
                f"num_samples says {sizes[name]}, x has {len(user.inputs)} and y {len(user.targets)}; create it again"
            )
        if user.targets:
            yield user
