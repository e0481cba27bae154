"""Data module for sparse classification data in LibSVM's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbc_lightning.core.checks import Count, Positive
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.text import shorten
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import IID, Partitioner

from .own_rows import readable

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
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        classes: Labels in the file of classes 0, 1, ...; available after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, or the file is missing or damaged.
    """

    def __init__(
        self,
        path: str | Path,
        partitioner: Partitioner | None = None,
        *,
        num_features: Count | None = None,
        row_norm: Positive | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partitioner or IID(5), **kwargs)
        self.path = Path(path).expanduser()
        self.num_features, self.row_norm = num_features, row_norm
        self.classes: list[float] = []

    def load(self) -> LoadedData:
        """Return all rows, in the order of the file."""
        from sklearn.datasets import load_svmlight_file  # takes a second to import

        with readable(self.path, "path", LAYOUT):
            rows, values = load_svmlight_file(str(self.path), dtype=np.float32)
            found = rows.shape[1]
            if not rows.shape[0] or not (np.isfinite(rows.data).all() and np.isfinite(values).all()):
                raise ValueError("it has no row, or a number that is not finite")
        if self.num_features is not None and found > self.num_features:
            raise ConfigurationError(f"data.num_features={self.num_features}: '{self.path}' has {found}; give as many")
        # The reader makes as many columns as the largest index in this file, and parts of a data set may lack the last
        # ones.
        rows.resize(rows.shape[0], self.num_features or found)
        classes, labels = np.unique(values.astype(np.float64), return_inverse=True)
        if not np.array_equal(classes, np.rint(classes)) or len(classes) < 2:
            raise ConfigurationError(
                f"data.path='{self.path}': labels are {shorten([f'{value:g}' for value in classes], 5)}; give a "
                "classification task, with two or more whole numbers"
            )
        self.classes = classes.tolist()
        inputs = rows.toarray()
        if self.row_norm is not None:
            norms = np.linalg.norm(inputs, axis=1, keepdims=True)
            inputs *= self.row_norm / np.where(norms > 0, norms, 1)  # a row of zeros stays
        labels = labels.astype(np.int64)
        return LoadedData(ArrayDataset((torch.from_numpy(inputs), torch.from_numpy(labels))), labels)
