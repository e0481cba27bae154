"""Data module for sparse classification data in LibSVM's format."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbc_lightning.core.checks import Count, Positive, check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import IID, Partitioner

from .findings import check_file

LAYOUT = "expected lines '<label> <index>:<value> ...' with rising indices, e.g. '-1 3:1 11:1 14:1' (also .gz, .bz2)"


class LibSVMDataModule(IndexedDataModule):
    """Federates a classification file of LibSVM's collection, e.g. a1a.

    Inputs are float32 ``(B, num_features)``, targets int64 ``(B,)``, the position of the label among the sorted labels
    (0 for -1, 1 for +1). The splits of the L2GD paper are ``IID(N)`` (homogeneous) and
    ``Shards(N, shards_per_client=1)`` (heterogeneous: sorted by label, then cut into N parts).

    Args:
        path: Path of the file; ``.gz`` and ``.bz2`` files are unpacked while reading.
        partitioner: Partitioner that assigns rows to clients; None is ``IID(5)``.
        num_features: Number of features; None is the largest index in the file. In a1a that is 119, of which 113 occur;
            the whole Adult data have 123.
        row_norm: Euclidean length, above 0, to which each row is scaled; None does not scale. With 2 the logistic loss
            of every row is 1-smooth, as in the study of L2GD.
        max_memory_gib: Largest memory of the dense rows, in GiB.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        classes: Labels in the file of classes 0, 1, ...; available after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, or the file is missing, too large or damaged; the message names
            the damaged line.
    """

    def __init__(
        self,
        path: str,
        partitioner: Partitioner | None = None,
        *,
        num_features: Count | None = None,
        row_norm: Positive | None = None,
        max_memory_gib: Positive = 4.0,
        **kwargs: Any,
    ) -> None:
        check_arguments(LibSVMDataModule, locals(), "data")
        super().__init__(partitioner or IID(5), **kwargs)
        self.path = Path(path).expanduser()
        self.num_features = num_features
        self.row_norm = row_norm
        self.max_memory_gib = max_memory_gib
        self.classes: list[float] = []

    def prepare_data(self) -> None:
        """Check that the file exists."""
        check_file(self.path, "path", LAYOUT)

    def load(self) -> LoadedData:
        """Return all rows, in the order of the file."""
        rows, values = self._read()
        num_bytes = 4 * rows.shape[0] * rows.shape[1]
        if num_bytes > self.max_memory_gib * 2**30:
            raise ConfigurationError(
                f"data.path='{self.path}': {rows.shape[0]:,} rows of {rows.shape[1]:,} features are "
                f"{num_bytes / 2**30:.1f} GiB when dense, data.max_memory_gib is {self.max_memory_gib:g}; raise it if "
                "the machine has so much"
            )
        classes, labels = np.unique(values, return_inverse=True)
        if not np.array_equal(classes, np.rint(classes)) or len(classes) < 2:
            raise ConfigurationError(
                f"data.path='{self.path}': labels are {', '.join(f'{value:g}' for value in classes[:5])}"
                f"{', ...' if len(classes) > 5 else ''}; give a classification task, with two or more whole numbers"
            )
        self.classes = classes.tolist()
        inputs = rows.toarray()
        if self.row_norm is not None:
            norms = np.linalg.norm(inputs, axis=1, keepdims=True)
            inputs *= self.row_norm / np.where(norms > 0, norms, 1)
        labels = labels.astype(np.int64)
        return LoadedData(ArrayDataset((torch.from_numpy(inputs), torch.from_numpy(labels))), labels)

    def _read(self) -> tuple[Any, np.ndarray]:
        """Read the rows as a sparse float32 matrix ``(M, num_features)``, and the labels, float64 ``(M,)``."""
        from sklearn.datasets import load_svmlight_file  # takes a second to import

        try:
            rows, values = load_svmlight_file(str(self.path), dtype=np.float32)
        except (OSError, EOFError, ValueError, OverflowError) as error:
            where = find_bad_line(self.path) or f"{self.path.name} cannot be read ({str(error).splitlines()[0]})"
            raise ConfigurationError(f"data.path='{self.path}': {where}; {LAYOUT}") from None
        if not rows.shape[0]:
            raise ConfigurationError(f"data.path='{self.path}': it holds no row; {LAYOUT}")
        if not (np.isfinite(rows.data).all() and np.isfinite(values).all()):
            raise ConfigurationError(f"data.path='{self.path}': {find_bad_line(self.path)}; {LAYOUT}")
        found = rows.shape[1]
        if self.num_features is not None and found > self.num_features:
            raise ConfigurationError(
                f"data.num_features={self.num_features}: '{self.path}' has {found}; give at least {found}"
            )
        rows.resize(rows.shape[0], self.num_features or found)
        return rows, values.astype(np.float64)


def find_bad_line(path: Path) -> str | None:
    """Describe the first line that is not in LibSVM's format or cannot be read, or return None if there is none."""
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
    number = 0
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                words = line.partition(b"#")[0].split()
                if words and (reason := _find_fault(words)):
                    return f"line {number}: {reason}"
    except (OSError, EOFError) as error:
        return f"after line {number}: {error}"
    return None


def _find_fault(words: list[bytes]) -> str | None:
    last = -1
    for position, word in enumerate(words):
        index, colon, value = word.rpartition(b":")
        shown = word[:30].decode("latin-1")
        try:
            number = float(value)
            if position and index != b"qid":
                if int(index) <= last:
                    return f"index {int(index)} comes after {last}"
                last = int(index)
        except ValueError:
            return f"found {shown!r}"
        if not np.isfinite(number):
            return f"{shown!r} is not a finite number"
        if bool(colon) != bool(position):
            return f"found {shown!r}"
    return None
