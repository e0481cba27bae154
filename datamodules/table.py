"""One's own data as a table: CSV or Parquet, with or without a client column."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset

from fedbc_lightning.checks import check_choice
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.labels import natural_clients
from fedbc_lightning.partition import IID, Natural, Partition, Partitioner

from .table_columns import Features, check_columns, check_complete, encode_targets, find_classes
from .table_files import LAYOUT, read_names, read_table

if TYPE_CHECKING:
    from pandas import DataFrame

DEFAULT_TEST_FRACTION = 0.2
MANY_CLASSES = 50
"""From here on a target of whole numbers looks more like a quantity than like classes."""


class TableDataModule(IndexedDataModule):
    """Rows of a CSV, TSV or Parquet file; a client is a value of the client column, or made by a partitioner.

    Inputs are float32 ``(B, F)``: the numeric columns, then one feature for each value of each categorical column (1 if
    the row has it). Targets are classes, int64 ``(B,)``, or numbers, float32 ``(B,)``. In a file, no value may be
    missing in a column that is used.

    Args:
        path: The file.
        target: Column to predict.
        client: Column that tells the client of each row; None: a partitioner deals the rows out.
        features: Columns that are inputs; None: all but ``target`` and ``client``.
        categorical: Those of the features that are not numbers, e.g. of text; a value that only ``test_path`` has is 0
            in all its column's features.
        test_path: File of test data with the same columns. Where it has the client column, its rows are these clients'
            test data; where it has not, they belong to no client and test the global model.
        task: ``"classification"``, ``"regression"``, or ``"auto"``: regression where the target is a number with a
            point, else classification.
        standardize: Subtract each numeric column's mean and divide by its standard deviation, both of all clients'
            training rows; a constant column becomes 0.
        partitioner: Which client has which rows; None: ``Natural()`` where there is a client column, else ``IID(10)``.
        test_fraction: Of each client's rows that are its test data, in (0, 1); None: those of ``test_path``, else 0.2.
        **kwargs: Of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        classes: The target's values, sorted: the names of classes 0, 1, ...; None of regression. There after ``setup``.
        feature_names: Of the F features; there after ``setup``.

    Raises:
        ConfigurationError: A file is missing or damaged, a column is unknown, or its values cannot be used.
    """

    def __init__(
        self,
        path: str,
        target: str,
        client: str | None = None,
        *,
        features: list[str] | None = None,
        categorical: list[str] | None = None,
        test_path: str | None = None,
        task: Literal["auto", "classification", "regression"] = "auto",
        standardize: bool = False,
        partitioner: Partitioner | None = None,
        test_fraction: float | None = None,
        **kwargs: Any,
    ) -> None:
        default = IID(10) if client is None else Natural()
        super().__init__(partitioner or default, test_fraction=test_fraction, **kwargs)
        check_choice("data.task", task, ("auto", "classification", "regression"))
        self.path = Path(path).expanduser()
        self.test_path = None if test_path is None else Path(test_path).expanduser()
        self.target, self.client = target, client
        self.features, self.categorical = features, categorical or []
        self.task, self.standardize = task, standardize
        self.classes: list[str] | None = None
        self.feature_names: list[str] = []
        self._num_numeric = 0

    def prepare_data(self) -> None:
        """Check that the files have the columns, without reading their rows."""
        names = read_names(self.path, "path")
        wanted = {"target": [self.target], "client": [] if self.client is None else [self.client]}
        check_columns({**wanted, "features": self.features or []}, names, f"'{self.path}'")
        inputs = self._inputs(names)
        if self.target in inputs:
            raise ConfigurationError(f"data.features: '{self.target}' is data.target; leave it out")
        check_columns({"categorical": self.categorical}, inputs, f"the features of '{self.path}'")
        if not inputs:
            raise ConfigurationError(f"data.features: '{self.path}' has no column left to be one; {LAYOUT}")
        if self.test_path is not None:
            test_names = read_names(self.test_path, "test_path")
            check_columns({"target": [self.target], "features": inputs}, test_names, f"'{self.test_path}'")

    def load(self) -> LoadedData:
        """All rows in their order, the clients' test rows behind them."""
        self.prepare_data()
        inputs = self._inputs(read_names(self.path, "path"))
        table = self._read(self.path, inputs, "path")
        features = Features.find(table, inputs, self.categorical, str(self.path))
        classes = find_classes(table[self.target], self.task, f"'{self.target}' of '{self.path}'")
        self.feature_names, self._num_numeric = features.names, len(features.numeric)
        self.classes = None if classes is None else [str(name) for name in classes]
        x, y, clients = self._encode(table, features, classes, self.path)
        self._describe(table, clients)
        if self.test_path is None:
            if self.test_fraction is None:
                self.test_fraction = DEFAULT_TEST_FRACTION
            return _as_loaded(x, y, clients)
        test = self._read(self.test_path, inputs, "test_path")
        test_x, test_y, test_clients = self._encode(test, features, classes, self.test_path)
        if clients is None or test_clients is None:
            data = _as_loaded(x, y, clients)
            data.shared_test = _as_loaded(test_x, test_y, None).dataset
            return data
        if clients.dtype.kind != test_clients.dtype.kind:
            clients, test_clients = clients.astype(str), test_clients.astype(str)
        strange = np.setdiff1d(test_clients, clients)
        if len(strange):
            raise ConfigurationError(
                f"data.client: '{strange[0]}' of '{self.test_path}' has no row in '{self.path}' to train on"
            )
        both = np.concatenate([clients, test_clients])
        data = _as_loaded(np.concatenate([x, test_x]), np.concatenate([y, test_y]), both)
        data.is_test = np.arange(len(both)) >= len(x)
        return data

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """Standardize the numeric columns, now that the training rows are known."""
        if self.standardize and self._num_numeric:
            indices = self.splits["train"].indices
            tables = [_rows(data.dataset)] + ([] if data.shared_test is None else [_rows(data.shared_test)])
            for column in range(self._num_numeric):
                train = tables[0][indices, column].astype(np.float64)
                mean, std = train.mean(), train.std() if np.ptp(train) else 1.0
                for rows in tables:
                    rows[:, column] = (rows[:, column] - mean) / std  # in place: the data set sees it
        return data.dataset

    def _inputs(self, names: list[str]) -> list[str]:
        """The columns that are features."""
        return self.features or [name for name in names if name not in (self.target, self.client)]

    def _read(self, path: Path, inputs: list[str], argument: str) -> DataFrame:
        """The columns that are used, complete; a test file may have no client column."""
        names = read_names(path, argument)
        keys = [self.target] if self.client is None or self.client not in names else [self.target, self.client]
        table = read_table(path, list(dict.fromkeys([*inputs, *keys])), argument)
        if not len(table):
            raise ConfigurationError(f"data.{argument}='{path}': no row below the header; {LAYOUT}")
        check_complete(table, str(path))
        return table

    def _encode(
        self, table: DataFrame, features: Features, classes: np.ndarray | None, path: Path
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Features float32 ``(M, F)``, targets ``(M,)`` and, where they are told, clients ``(M,)``."""
        targets = encode_targets(table[self.target], classes, f"'{self.target}' of '{path}'")
        clients = None
        if self.client is not None and self.client in table:
            column = table[self.client]
            clients = column.to_numpy() if column.dtype.kind in "biuf" else column.astype(str).to_numpy().astype(str)
        return features.encode(table, str(path)), targets, clients

    def _describe(self, table: DataFrame, clients: np.ndarray | None) -> None:
        """Say what was found: a quantity taken for classes is seen here."""
        found = "a number" if self.classes is None else f"{len(self.classes):,} classes"
        owners = "" if clients is None else f", {len(np.unique(clients)):,} values of '{self.client}'"
        hint = ""
        is_whole = table[self.target].dtype.kind in "iu" and self.classes is not None
        if self.task == "auto" and is_whole and len(self.classes or ()) > MANY_CLASSES:
            hint = " Is it a quantity? Then set data.task=regression."
        rank_zero_info(
            f"'{self.path}': {len(table):,} rows, {len(self.feature_names):,} features, '{self.target}' is {found}"
            f"{owners}.{hint}"
        )


def _as_loaded(inputs: np.ndarray, targets: np.ndarray, clients: np.ndarray | None) -> LoadedData:
    dataset = ArrayDataset((torch.from_numpy(inputs), torch.from_numpy(targets)))
    labels = targets if targets.dtype == np.int64 else None
    if clients is None:
        return LoadedData(dataset, labels)
    owners, names = natural_clients(clients)
    return LoadedData(dataset, labels, owners, names)


def _rows(dataset: Dataset) -> np.ndarray:
    """The features that a data set holds."""
    assert isinstance(dataset, ArrayDataset)
    return dataset.pool.tensors[0].numpy()
