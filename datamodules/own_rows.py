"""What data of the user's own share: reading files, naming columns and classes, and joining training and test rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean, in_one_line
from fedbc_lightning.core.text import shorten
from fedbc_lightning.data import ArrayDataset, LoadedData
from fedbc_lightning.data.datasets import Transform, natural_clients


class Rows(NamedTuple):
    """Rows of a file or of arrays.

    Attributes:
        inputs: Inputs ``(M, ...)``.
        targets: Targets ``(M, ...)``.
        clients: Name or number of the client of each row ``(M,)``; None if no row has one.
    """

    inputs: Tensor
    targets: Tensor
    clients: np.ndarray | None


def join_rows(
    train: Rows, test: Rows | None, transform: Transform | None = None, order: Callable[[str], Any] | None = None
) -> LoadedData:
    """Return training rows, and test rows behind them: the clients' own if both name clients, else shared ones.

    Args:
        train: Training rows.
        test: Test rows, or None.
        transform: Transform of the inputs of a batch.
        order: Key by which names of clients are sorted; None is their own order.

    Raises:
        ConfigurationError: Samples of the two differ in type or shape.
    """
    if test is None:
        tensors = train.inputs, train.targets
    else:
        for name, one, other in (("inputs", test.inputs, train.inputs), ("targets", test.targets, train.targets)):
            if one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
                raise ConfigurationError(f"data.test_{name}: {form_of(one)}, but data.{name} is {form_of(other)}")
        tensors = torch.cat([train.inputs, test.inputs]), torch.cat([train.targets, test.targets])
    data = LoadedData(ArrayDataset(tensors, None, transform), labels_of_tensor(tensors[1]))
    is_test = np.arange(len(tensors[1])) >= len(train.targets)
    owners = None if test is None else test.clients
    if train.clients is not None:
        # Rows that no client owns are given to the first one here, and taken away again by with_test.
        others = np.repeat(train.clients[:1], is_test.sum()) if owners is None else owners
        data.clients, data.client_names = natural_clients(np.concatenate([train.clients, others]), order)
    return data.with_test(is_test, is_shared=train.clients is None or owners is None)


def labels_of_tensor(targets: Tensor) -> np.ndarray | None:
    """Return the classes ``(M,)``, or None if the targets are none."""
    return targets.numpy() if targets.ndim == 1 and targets.dtype == torch.int64 else None


def form_of(tensor: Tensor) -> str:
    """Describe the type and shape of samples."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape[1:])}".removeprefix("torch.")


def number_classes(values: np.ndarray, classes: np.ndarray, where: str) -> np.ndarray:
    """Return the positions of values ``(M,)`` among sorted classes, int64 ``(M,)``.

    Raises:
        ConfigurationError: A value is no class; ``where`` says whose.
    """
    if (values.dtype.kind == "U") != (classes.dtype.kind == "U"):
        raise ConfigurationError(f"{where}: found '{values[0]}', a value of another kind than in the training data")
    positions = np.searchsorted(classes, values).clip(max=len(classes) - 1)
    unknown = classes[positions] != values
    if unknown.any():
        raise ConfigurationError(f"{where}: the class '{values[unknown.argmax()]}' does not occur in the training data")
    return positions.astype(np.int64)


@contextmanager
def readable(path: Path, argument: str, layout: str) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one line.

    Args:
        path: Path of the file.
        argument: Name of the argument that gives the path, for the message, e.g. ``"path"``.
        layout: Description of the expected file, for the message.

    Raises:
        ConfigurationError: There is no file at the path, or it cannot be read.
    """
    if not path.is_file():
        raise ConfigurationError(f"data.{argument}='{path}': no such file; {layout}")
    # For damaged files NumPy, pandas, pyarrow, scikit-learn and torch raise exceptions of more than ten classes
    with in_one_line(f"data.{argument}='{path}': cannot be read (", f"); {layout}"):
        yield


def check_columns(wanted: dict[str, Sequence[str | None]], available: list[str], where: str) -> None:
    """Check that a table has the columns that are needed.

    Args:
        wanted: Names of the columns by the argument that gives them, e.g. ``{"target": ["y"]}``; None is no column.
        available: Names of the columns of the table.
        where: Name of the table for the message, e.g. ``"'train.csv'"``.

    Raises:
        ConfigurationError: A column is missing; the message suggests a similar name.
    """
    for argument, names in wanted.items():
        for name in names:
            if name is not None and name not in available:
                hint = did_you_mean(str(name), available, f"there are {shorten(available, 20)}")
                raise ConfigurationError(f"data.{argument}: no column '{name}' in {where}; {hint}")


def by_value(name: str) -> tuple[int, int, str]:
    """Return a sorting key of a name: whole numbers come first, by value, then all others in alphabetical order."""
    is_whole = name.isascii() and name.isdecimal()
    return (not is_whole, int(name) if is_whole else 0, name)
