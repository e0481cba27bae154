"""Reading of LEAF's JSON files, one user at a time.

A file holds ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, LoadedData
from fedbc_lightning.data.datasets import Transform

LAYOUT = "expected <path>/{train,test}/*.json, or <path>/*.json, or one file, as LEAF's preprocess.sh writes them"
KEYS = ("users", "num_samples", "user_data")
DECODER = json.JSONDecoder()
SPACE = re.compile(r"[ \t\n\r]*")


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
    """Read all files, and convert them user by user to save memory; a user in several files is one client.

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
    files = [(file, False) for file in train_files] + [(file, True) for file in test_files]
    inputs, targets, clients, is_test = [], [], [], []
    numbers: dict[str, int] = {}
    console = Console(stderr=True)
    for file, tests in track(files, "reading LEAF files", console=console, disable=not console.is_terminal):
        for user in read_users(file):
            if not user.targets:
                continue
            x, y = encode(user)
            inputs.append(x)
            targets.append(y)
            clients.append(np.full(len(y), numbers.setdefault(user.name, len(numbers))))
            is_test.append(np.full(len(y), tests))
    if not inputs:
        raise ConfigurationError(f"data.path='{path}': no user in its files has a sample")
    owner, tested = np.concatenate(clients), np.concatenate(is_test)
    tensors = torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(targets))
    dataset = ArrayDataset(tensors, transform=transform)
    labels = tensors[1].numpy() if classes else None
    names = list(numbers)
    if not test_files:
        return LoadedData(dataset, labels, owner, names)
    untrained = np.setdiff1d(owner[tested], owner[~tested])
    if not len(untrained):
        return LoadedData(dataset, labels, owner, names, is_test=tested)
    if len(untrained) < len(np.unique(owner[tested])):
        raise ConfigurationError(
            f"data.path='{path}': user '{names[untrained[0]]}' has test samples only, while others have both; give "
            "every user training samples, or divide all users by LEAF's '-t user'"
        )
    train, test = np.flatnonzero(~tested), np.flatnonzero(tested)
    labels = None if labels is None else labels[train]
    return LoadedData(dataset.subset(train), labels, owner[train], names, shared_test=dataset.subset(test))


def read_users(path: Path) -> Iterator[LeafUser]:
    """Yield the users of one file in its order; only one user's samples are Python objects at a time.

    Raises:
        ConfigurationError: The file cannot be read, is cut off or is not of LEAF's form; file and user are named.
    """
    try:
        cursor = _Cursor(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"data.path: cannot read '{path}' ({error})") from error
    listed: dict[str, Any] = {}
    counts: dict[str, int] = {}
    name = None
    try:
        for key in cursor.members():
            if key != "user_data":
                listed[key] = cursor.value()
                continue
            listed[key] = None
            for name in cursor.members():
                user = _make_user(name, cursor.value(), path)
                counts[name] = counts.get(name, 0) + len(user.targets)
                yield user
            name = None
    except json.JSONDecodeError as error:
        at = "" if name is None else f" in the data of user '{name}'"
        raise ConfigurationError(
            f"data.path: '{path}' is cut off or damaged{at} ({error.msg} at character {error.pos:,} of "
            f"{len(cursor.text):,}); create the file again"
        ) from None
    _check_lists(listed, counts, path)


def _make_user(name: str, content: Any, path: Path) -> LeafUser:
    for key in ("x", "y"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise ConfigurationError(f"data.path: '{path}', user '{name}': no list '{key}'; {LAYOUT}")
    user = LeafUser(name, content["x"], content["y"], path)
    if len(user.inputs) != len(user.targets):
        raise user.refuse(f"x has {len(user.inputs)} samples and y {len(user.targets)}; the file is damaged")
    return user


def _check_lists(listed: dict[str, Any], counts: dict[str, int], path: Path) -> None:
    """Check that "users" and "num_samples" agree with "user_data"."""
    for key in KEYS:
        if key not in listed:
            raise ConfigurationError(f"data.path: '{path}' has no key '{key}'; {LAYOUT}")
    users, sizes = listed["users"], listed["num_samples"]
    if not isinstance(users, list) or not isinstance(sizes, list) or len(users) != len(sizes):
        raise ConfigurationError(f"data.path: '{path}': 'users' and 'num_samples' are no lists of one length; {LAYOUT}")
    users = [str(user) for user in users]
    for user in counts.keys() - set(users):
        raise ConfigurationError(f"data.path: '{path}', user '{user}': in 'user_data', but not in 'users'")
    for user, size in zip(users, sizes, strict=True):
        if user not in counts:
            raise ConfigurationError(f"data.path: '{path}', user '{user}': in 'users', but not in 'user_data'")
        if counts[user] != size:
            raise ConfigurationError(
                f"data.path: '{path}', user '{user}': num_samples says {size}, the file holds {counts[user]}; create "
                "the file again"
            )


class _Cursor:
    """Walks through JSON text, so that a large object need not be decoded at once.

    Args:
        text: Text of the whole file.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def value(self) -> Any:
        """Decode and return the next value."""
        self._skip()
        value, self.position = DECODER.raw_decode(self.text, self.position)
        return value

    def members(self) -> Iterator[str]:
        """Yield the keys of the next object; the caller must read the value of each before it asks for the next key."""
        self._take("{")
        if self._next() == "}":
            return self._take("}")
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise json.JSONDecodeError("Expecting a name in quotes", self.text, self.position)
            self._take(":")
            yield key
            if self._next() != ",":
                return self._take("}")
            self._take(",")

    def _next(self) -> str:
        self._skip()
        return self.text[self.position : self.position + 1]

    def _take(self, symbol: str) -> None:
        if self._next() != symbol:
            raise json.JSONDecodeError(f"Expecting '{symbol}'", self.text, self.position)
        self.position += 1

    def _skip(self) -> None:
        found = SPACE.match(self.text, self.position)
        assert found is not None  # the pattern also matches the empty string
        self.position = found.end()
