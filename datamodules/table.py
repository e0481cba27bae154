"""Data module for data of your own in a table: CSV or Parquet, with or without a client column."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset

from fedbc_lightning.core.checks import check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import IID, Natural, Partition, Partitioner

from .findings import look_like_classes, shorten
from .table_columns import Features, as_names, check_columns, check_complete, encode_targets, find_classes, without_gaps
from .table_files import LAYOUT, read_names, read_table

if TYPE_CHECKING:
    from pandas import DataFrame

DEFAULT_TEST_FRACTION = 0.2
MANY_CLASSES = 50
"""Number of distinct values above which a target of whole numbers looks like a quantity and not like classes."""

FAR_FROM_UNIT = 10.0
"""Root mean square of a feature above which gradient descent becomes slow, or diverges at usual learning rates.

A large mean counts as much as a large deviation: steps on the mean squared error diverge if the learning rate is above
1 divided by the mean square, which is 0.0014 for a body mass index of 26 with a deviation of 4.
"""


class TableDataModule(IndexedDataModule):
    """Federates the rows of a CSV, TSV or Parquet file, by a client column or with a partitioner.

    Inputs are float32 ``(B, F)``: the numeric columns, then one feature for each value of each categorical column (1 if
    the row has the value). Targets are classes, int64 ``(B,)``, or numbers, float32 ``(B,)``. No value may be missing
    in a column that is used, unless ``missing`` says what to do. Clients and categories are names. In a CSV or TSV file
    they are taken as they are written: "01" and "1" are two names, and NA is a name. In a Parquet file the integer 1,
    the float 1.0 and the string "1" are the same name.

    Args:
        path: Path of the file.
        target: Name of the column to predict.
        client: Name of the column with the client of each row; None if there is none, so that a partitioner makes
            clients.
        features: Names of the columns that are inputs; None is all except ``target``, ``client`` and ``exclude``.
        exclude: Names of columns that are no inputs, such as a number of the row; only without ``features``.
        categorical: Names of the features that are not numbers, e.g. text. A value that occurs in ``test_path`` only is
            0 in all features of its column.
        test_path: Path of a file of test data with the same columns. If it has the client column, its rows are these
            clients' test data; if not, they belong to no client and evaluate the global model.
        task: Kind of prediction: ``"classification"``, ``"regression"``, or ``"auto"``, which is regression if the
            target column holds floating-point numbers, else classification. With ``"classification"`` 1.0 is the class
            "1".
        missing: Treatment of rows that miss a value in a column that is used: ``"refuse"`` is an error that names the
            first one, ``"drop_rows"`` leaves such rows out and says how many.
        standardize: Whether to subtract each numeric column's mean and divide by its standard deviation, both over the
            training rows of all clients that are not held out. This is done in float64 (so that a time in seconds keeps
            its digits); a constant column becomes 0.
        partitioner: Partitioner that assigns rows to clients; None is ``Natural()`` if there is a client column, else
            ``IID(10)``.
        test_fraction: Fraction of each client's rows that are its test data, in (0, 1); None uses ``test_path``, or 0.2
            if there is none.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        classes: Sorted values of the target, the names of classes 0, 1, ...; None for a regression. Available after
            ``setup``.
        feature_names: Names of the F features; available after ``setup``.

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
        exclude: list[str] | None = None,
        categorical: list[str] | None = None,
        test_path: str | None = None,
        task: Literal["auto", "classification", "regression"] = "auto",
        missing: Literal["refuse", "drop_rows"] = "refuse",
        standardize: bool = False,
        partitioner: Partitioner | None = None,
        test_fraction: float | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(TableDataModule, locals(), "data")
        default = IID(10) if client is None else Natural()
        super().__init__(partitioner or default, test_fraction=test_fraction, **kwargs)
        if features is not None and exclude:
            raise ConfigurationError("data.exclude: data.features names all inputs already; give one of the two")
        self.path = Path(path).expanduser()
        self.test_path = None if test_path is None else Path(test_path).expanduser()
        self.target, self.client = target, client
        self.features, self.exclude, self.categorical = features, exclude or [], categorical or []
        self.missing = missing
        self.task, self.standardize = task, standardize
        self.classes: list[str] | None = None
        self.feature_names: list[str] = []
        self._numbers: list[np.ndarray] = []  # numeric columns of each file, from load to alter

    def prepare_data(self) -> None:
        """Check that the files have the columns that are needed, without reading their rows."""
        names = read_names(self.path, "path")
        wanted = {"target": [self.target], "client": [] if self.client is None else [self.client]}
        wanted |= {"features": self.features or [], "exclude": self.exclude}
        check_columns(wanted, names, f"'{self.path}'")
        inputs = self._inputs(names)
        if self.target in inputs:
            raise ConfigurationError(f"data.features: '{self.target}' is data.target; leave it out")
        if self.client in inputs and self.client not in self.categorical:
            raise ConfigurationError(
                f"data.features: '{self.client}' is data.client, which holds names; leave it out, or list it in "
                "data.categorical, too"
            )
        check_columns({"categorical": self.categorical}, inputs, f"the features of '{self.path}'")
        if not inputs:
            raise ConfigurationError(f"data.features: '{self.path}' has no column left to be one; {LAYOUT}")
        if self.test_path is not None:
            test_names = read_names(self.test_path, "test_path")
            check_columns({"target": [self.target], "features": inputs}, test_names, f"'{self.test_path}'")

    def load(self) -> LoadedData:
        """Return all rows in their order, followed by the clients' test rows."""
        self.prepare_data()
        inputs = self._inputs(read_names(self.path, "path"))
        table = self._read(self.path, inputs, "path")
        features = Features.find(table, inputs, self.categorical, str(self.path))
        classes = find_classes(table[self.target], self.task, f"'{self.target}' of '{self.path}'")
        self.feature_names = features.names
        self.classes = None if classes is None else [str(name) for name in classes]
        self._numbers = [features.numbers(table)] if self.standardize else []
        x, y, clients = self._encode(table, features, classes, self.path)
        self._describe(table, features, clients)
        if self.test_path is None:
            if self.test_fraction is None:
                self.test_fraction = DEFAULT_TEST_FRACTION
            return _as_loaded(x, y, clients)
        test = self._read(self.test_path, inputs, "test_path")
        test_x, test_y, test_clients = self._encode(test, features, classes, self.test_path)
        self._numbers += [features.numbers(test)] if self.standardize else []
        if clients is None or test_clients is None:
            data = _as_loaded(x, y, clients)
            data.shared_test = _as_loaded(test_x, test_y, None).dataset
            return data
        strange = set(test_clients) - set(clients)
        if strange:
            raise ConfigurationError(
                f"data.client: '{min(strange)}' of '{self.test_path}' has no row in '{self.path}' to train on"
            )
        both = np.concatenate([clients, test_clients])
        data = _as_loaded(np.concatenate([x, test_x]), np.concatenate([y, test_y]), both)
        data.is_test = np.arange(len(both)) >= len(x)
        return data

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """Standardize the numeric columns, now that the training rows are known."""
        if self._numbers:
            indices = self.indices_of_training_clients("train")  # all of the first file
            rows = _rows(data.dataset)
            num_rows = len(self._numbers[0])
            tables = [rows[:num_rows], rows[num_rows:] if data.shared_test is None else _rows(data.shared_test)]
            for column in range(self._numbers[0].shape[1]):
                train = self._numbers[0][indices, column]
                mean, std = train.mean(), train.std() if np.ptp(train) else 1.0
                for numbers, table in zip(self._numbers, tables, strict=False):
                    table[:, column] = (numbers[:, column] - mean) / std  # in place: the data set sees it
            self._numbers = []
        return data.dataset

    def _inputs(self, names: list[str]) -> list[str]:
        """Return the names of the columns that are features."""
        if self.features is not None:
            return self.features
        return [name for name in names if name not in (self.target, self.client, *self.exclude)]

    def _read(self, path: Path, inputs: list[str], argument: str) -> DataFrame:
        """Read the columns that are used, and check that no value is missing; a test file may have no client column."""
        names = read_names(path, argument)
        keys = [self.target] if self.client is None or self.client not in names else [self.target, self.client]
        as_written = {*self.categorical, *keys[1:]}
        table = read_table(path, list(dict.fromkeys([*inputs, *keys])), argument, as_written)
        if not len(table):
            raise ConfigurationError(f"data.{argument}='{path}': no row below the header; {LAYOUT}")
        if self.missing == "drop_rows":
            return without_gaps(table, self.target, str(path))
        check_complete(table, keys, str(path))
        return table

    def _encode(
        self, table: DataFrame, features: Features, classes: np.ndarray | None, path: Path
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return features, float32 ``(M, F)``, targets ``(M,)`` and the clients' names ``(M,)``, or None if none."""
        targets = encode_targets(table[self.target], classes, f"'{self.target}' of '{path}'")
        clients = None
        if self.client is not None and self.client in table:
            clients = as_names(table[self.client])
        return features.encode(table, str(path)), targets, clients

    def _describe(self, table: DataFrame, features: Features, clients: np.ndarray | None) -> None:
        """Print what was found, so that the user notices a quantity taken for classes, or classes for a quantity."""
        target = table[self.target]
        found = "a number" if self.classes is None else f"{len(self.classes):,} classes"
        owners = "" if clients is None else f", {len(set(clients)):,} values of '{self.client}'"
        hint = ""
        if self.task == "auto" and target.dtype.kind in "iu" and len(self.classes or ()) > MANY_CLASSES:
            hint = " Is it a quantity? Then set data.task=regression."
        if self.task == "auto" and target.dtype.kind == "f" and look_like_classes(target.to_numpy()):
            hint = " Is it a class? Then set data.task=classification."
        sizes = np.sqrt(np.square(features.numbers(table)).mean(axis=0))
        far = [f"'{name}'" for name, size in zip(features.numeric, sizes, strict=True) if size > FAR_FROM_UNIT]
        if far and not self.standardize:
            verb = "is" if len(far) == 1 else "are"
            hint += f" {shorten(far)} {verb} far from unit scale: data.standardize: true may help."
        rank_zero_info(
            f"'{self.path}': {len(table):,} rows, {len(self.feature_names):,} features, '{self.target}' is {found}"
            f"{owners}.{hint}"
        )


def _as_loaded(inputs: np.ndarray, targets: np.ndarray, clients: np.ndarray | None) -> LoadedData:
    dataset = ArrayDataset((torch.from_numpy(inputs), torch.from_numpy(targets)))
    labels = targets if targets.dtype == np.int64 else None
    if clients is None:
        return LoadedData(dataset, labels)
    found, owners = np.unique(clients, return_inverse=True)
    names = [str(name) for name in found]
    order = sorted(range(len(names)), key=lambda number: _by_value(names[number]))
    return LoadedData(dataset, labels, np.argsort(order)[owners], [names[number] for number in order])


def _by_value(name: str) -> tuple[int, int, str]:
    """Return a sorting key of a name: whole numbers come first, by value, then all others in alphabetical order."""
    is_whole = name.isascii() and name.isdecimal()
    return (not is_whole, int(name) if is_whole else 0, name)


def _rows(dataset: Dataset) -> np.ndarray:
    """Return the array of features that a data set holds; changes of the array change the data set."""
    assert isinstance(dataset, ArrayDataset)
    return dataset.pool.tensors[0].numpy()
