"""Data module for data of your own in a table: CSV or Parquet, with or without a client column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.text import shorten
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import IID, Natural, Partition, Partitioner

from .own_rows import Rows, by_value, check_columns, join_rows, number_classes, readable

if TYPE_CHECKING:
    from pandas import DataFrame, Series


SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
PARQUET = (".parquet", ".pq")
LAYOUT = (
    "expected a .csv (commas) or .tsv (tabs) file with a header line, also .gz, .bz2, .xz or .zip, or a .parquet file "
    "(pip install 'fedbc-lightning[parquet]')"
)
# Fields that mean a missing value in a numeric column of a CSV or TSV file; in a column of names only the empty one
# does, so that a client may be called NA or None, as pandas would not have it.
MISSING = ["", "#N/A", "NA", "N/A", "n/a", "<NA>", "NaN", "nan", "-nan", "null", "NULL", "None"]
# Root mean square of a feature above which gradient descent becomes slow, or diverges at usual learning rates. A large
# mean counts as much as a large deviation: steps on the mean squared error diverge if the learning rate is above 1
# divided by the mean square, which is 0.0014 for a body mass index of 26 with a deviation of 4.
FAR_FROM_UNIT = 10.0


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

    default_test_fraction: ClassVar[float | None] = 0.2

    def __init__(
        self,
        path: str | Path,
        target: str,
        client: str | None = None,
        *,
        features: list[str] | None = None,
        exclude: list[str] | None = None,
        categorical: list[str] | None = None,
        test_path: str | Path | None = None,
        task: Literal["auto", "classification", "regression"] = "auto",
        missing: Literal["refuse", "drop_rows"] = "refuse",
        standardize: bool = False,
        partitioner: Partitioner | None = None,
        test_fraction: float | None = None,
        **kwargs: Any,
    ) -> None:
        partitioner = partitioner or (IID(10) if client is None else Natural())
        super().__init__(partitioner, test_fraction=test_fraction, **kwargs)
        if features is not None and exclude:
            raise ConfigurationError("data.exclude: data.features names all inputs already; give one of the two")
        self.path = Path(path).expanduser()
        self.test_path = None if test_path is None else Path(test_path).expanduser()
        self.target, self.client = target, client
        self.features, self.exclude, self.categorical = features, exclude or [], categorical or []
        self.missing, self.task, self.standardize = missing, task, standardize
        self.classes: list[str] | None = None
        self.feature_names: list[str] = []
        self._numbers = np.empty((0, 0))  # the numeric columns of all rows, in float64, from load to alter

    def load(self) -> LoadedData:
        """Return all rows in their order, followed by the test rows."""
        inputs = self._find_inputs()
        table = self._read(self.path, inputs, "path")
        features = Features.find(table, inputs, self.categorical, str(self.path))
        classes = find_classes(table[self.target], self.task, f"'{self.target}' of '{self.path}'")
        self.feature_names = features.names
        self.classes = None if classes is None else [str(name) for name in classes]
        tables = [(table, self.path)]
        if self.test_path is not None:
            tables.append((self._read(self.test_path, inputs, "test_path"), self.test_path))
        train, *tests = (self._rows(rows, features, classes, path) for rows, path in tables)
        self._describe(features, train, features.numbers(table))
        if self.standardize:
            self._numbers = np.concatenate([features.numbers(rows) for rows, _ in tables])
        return join_rows(train, tests[0] if tests else None, order=by_value)

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """Standardize the numeric columns, now that the training rows are known."""
        if self.standardize:
            assert isinstance(data.dataset, ArrayDataset)
            # In place: training rows and shared test rows are in this one tensor, which their data sets share.
            inputs = data.dataset.pool.tensors[0].numpy()
            indices = self.indices_of_training_clients("train")  # of rows of the first file, which comes first
            for column, numbers in enumerate(self._numbers.T):
                train = numbers[indices]
                inputs[:, column] = (numbers - train.mean()) / (train.std() if np.ptp(train) else 1.0)
            self._numbers = np.empty((0, 0))
        return data.dataset

    def _find_inputs(self) -> list[str]:
        """Return the names of the columns that are features, after checks of all names, before any row is read."""
        names = read_names(self.path, "path")
        wanted: dict[str, Sequence[str | None]] = {"target": [self.target], "client": [self.client]}
        check_columns(wanted | {"features": self.features or [], "exclude": self.exclude}, names, f"'{self.path}'")
        others = {self.target, self.client, *self.exclude}
        inputs = [name for name in names if name not in others] if self.features is None else self.features
        check_columns({"categorical": self.categorical}, inputs, f"the features of '{self.path}'")
        taken = {self.target} | ({self.client} - set(self.categorical))
        if not inputs or taken & set(inputs):
            raise ConfigurationError(
                f"data.features: got {shorten(inputs)}; give one column or more without data.target, and data.client "
                "only if it is listed in data.categorical, too"
            )
        if self.test_path is not None:
            test_names = read_names(self.test_path, "test_path")
            check_columns({"target": [self.target], "features": inputs}, test_names, f"'{self.test_path}'")
        return inputs

    def _read(self, path: Path, inputs: list[str], argument: str) -> DataFrame:
        """Read the columns that are used, without rows that miss a value; a test file may have no client column."""
        has_client = self.client is not None and self.client in read_names(path, argument)
        keys = [self.target, *([self.client] if self.client is not None and has_client else [])]
        table = read_table(path, list(dict.fromkeys([*inputs, *keys])), argument, {*self.categorical, *keys[1:]})
        if not len(table):
            raise ConfigurationError(f"data.{argument}='{path}': no row below the header; {LAYOUT}")
        return without_gaps(table, self.target, str(path), drop=self.missing == "drop_rows")

    def _rows(self, table: DataFrame, features: Features, classes: np.ndarray | None, path: Path) -> Rows:
        """Convert a table to features, float32 ``(M, F)``, targets ``(M,)`` and the clients' names ``(M,)``."""
        column, where = table[self.target], f"data.target: '{self.target}' of '{path}'"
        values = column.to_numpy() if column.dtype.kind in "biuf" else column.astype(str).to_numpy().astype(str)
        if classes is not None:
            targets = number_classes(values, classes, where)
        elif values.dtype.kind == "U" or not np.isfinite(values.astype(np.float32)).all():
            raise ConfigurationError(f"{where}: a regression needs finite numbers only")
        else:
            targets = values.astype(np.float32)
        clients = as_names(table[self.client]) if self.client is not None and self.client in table else None
        return Rows(torch.from_numpy(features.encode(table, str(path))), torch.from_numpy(targets), clients)

    def _describe(self, features: Features, train: Rows, numbers: np.ndarray) -> None:
        """Print what was found, so that the user notices a quantity taken for classes, or classes for a quantity."""
        found = "a number" if self.classes is None else f"{len(self.classes):,} classes"
        owners = "" if train.clients is None else f", {len(set(train.clients)):,} values of '{self.client}'"
        sizes = np.sqrt(np.square(numbers).mean(axis=0))
        far = [f"'{name}'" for name, size in zip(features.numeric, sizes, strict=True) if size > FAR_FROM_UNIT]
        hint = f" Far from unit scale are {shorten(far)}: data.standardize: true may help." if far else ""
        rank_zero_info(
            f"'{self.path}': {len(train.targets):,} rows, {len(self.feature_names):,} features, '{self.target}' is "
            f"{found} (data.task){owners}.{'' if self.standardize else hint}"
        )


def _kind(path: Path, argument: str) -> str:
    """Return the ending of the path that tells the format, which a compression may follow."""
    kinds = [ending for ending in map(str.lower, path.suffixes[-2:]) if ending in (*SEPARATORS, *PARQUET)]
    if not kinds:
        raise ConfigurationError(f"data.{argument}='{path}': unknown kind of file; {LAYOUT}")
    return kinds[-1]


def read_names(path: Path, argument: str) -> list[str]:
    """Return the names of a table's columns; those of a saved index, which have no name, are left out.

    Args:
        path: Path of the table.
        argument: Name of the argument that gives the path, for messages.
    """
    with readable(path, argument, LAYOUT):
        if _kind(path, argument) in PARQUET:
            from pyarrow import parquet

            return [name for name in parquet.read_schema(path).names if not name.startswith("__index_level_")]
        names = _read_csv(path, argument, nrows=0).columns
        return [name for name in names if not name.startswith("Unnamed: ")]


def read_table(path: Path, columns: list[str], argument: str, names: set[str]) -> DataFrame:
    """Read columns of a table.

    Args:
        path: Path of the table.
        columns: Names of the columns.
        argument: Name of the argument that gives the path, for messages.
        names: Names of the columns whose fields are taken as they are written in a CSV or TSV file.
    """
    with readable(path, argument, LAYOUT):
        if _kind(path, argument) in PARQUET:
            from pyarrow import parquet

            # With pandas' metadata, a saved index would not be a column
            return parquet.read_table(path, columns=columns).to_pandas(ignore_metadata=True)[columns]
        as_text = names & set(columns)
        options = {
            "dtype": dict.fromkeys(as_text, str),
            "keep_default_na": False,
            "na_values": {name: [""] if name in as_text else MISSING for name in columns},
        }
        return _read_csv(path, argument, **options)[columns]  # with usecols, pandas would overlook lines too long


def _read_csv(path: Path, argument: str, **options: Any) -> DataFrame:
    import pandas as pd  # takes half a second to import

    table = pd.read_csv(path, sep=SEPARATORS[_kind(path, argument)], encoding="utf-8-sig", low_memory=False, **options)
    if not isinstance(table.index, pd.RangeIndex):  # pandas takes the first fields of longer lines for an index
        raise ConfigurationError(f"data.{argument}='{path}': its lines have more fields than its header; {LAYOUT}")
    return table


# Of a categorical column. Each value becomes a feature: a column of names or of free text would make a model of mostly
# useless weights, and is more likely a mistake than a category.
MAX_VALUES = 1000


@dataclass(frozen=True)
class Features:
    """The features of a table, as its training file defines them.

    Attributes:
        numeric: Names of the columns that are numbers.
        categories: Sorted values of each categorical column in the training file, by the column's name.
    """

    numeric: list[str]
    categories: dict[str, np.ndarray]

    @classmethod
    def find(cls, table: DataFrame, columns: list[str], categorical: list[str], path: str) -> Features:
        """Separate columns into numeric and categorical ones.

        Args:
            table: The training table.
            columns: Names of the columns that are features.
            categorical: Names of those of them that are categorical.
            path: Path of the table, for messages.

        Raises:
            ConfigurationError: A categorical column has too many values.
        """
        categories = {name: np.unique(as_names(table[name])) for name in columns if name in categorical}
        for name, values in categories.items():
            if len(values) > MAX_VALUES:
                raise ConfigurationError(
                    f"data.categorical: '{name}' of '{path}' has {len(values):,} values, each of which would be a "
                    f"feature (at most {MAX_VALUES:,}); leave it out (data.exclude)"
                )
        return cls([name for name in columns if name not in categorical], categories)

    @property
    def names(self) -> list[str]:
        """Names of the features, in their order: the numeric columns, then ``column=value``."""
        return self.numeric + [f"{name}={value}" for name, values in self.categories.items() for value in values]

    def encode(self, table: DataFrame, path: str) -> np.ndarray:
        """Return the features of a table, float32 ``(M, F)``.

        A value that the training file does not have is 0 in all features of its column, and a message names it.

        Args:
            table: The training table, or the test table.
            path: Path of the table, for messages.

        Raises:
            ConfigurationError: A value of a numeric column is not a finite number.
        """
        columns = []
        for name in self.numeric:
            _check_numbers(table[name], f"'{name}' of '{path}'")
            columns.append(table[name].to_numpy()[:, None])
        for name, values in self.categories.items():
            found = as_names(table[name])
            columns.append(found[:, None] == values)
            unknown = found[~columns[-1].any(axis=1)]
            if len(unknown):
                rank_zero_info(
                    f"'{path}': '{name}' is {shorten(np.unique(unknown).tolist(), 3)} in {len(unknown):,} of "
                    f"{len(found):,} rows, but in no row of data.path; these rows are 0 in all features of the column."
                )
        return np.concatenate([column.astype(np.float32) for column in columns], axis=1)

    def numbers(self, table: DataFrame) -> np.ndarray:
        """Return the numeric columns with the values of the file, float64 ``(M, len(numeric))``."""
        return table[self.numeric].to_numpy(np.float64)


def as_names(column: Series) -> np.ndarray:
    """Return the values as strings ``(M,)``; 1, 1.0 and "1" become the same name."""
    names = column.astype(str).to_numpy(object)
    if column.dtype.kind == "f":  # of a Parquet file, where a gap elsewhere may have made whole numbers floats
        numbers = column.to_numpy()
        whole = np.isfinite(numbers) & (numbers == np.rint(numbers))
        names[whole] = [str(int(number)) for number in numbers[whole]]
    return names


def find_classes(column: Series, task: str, where: str) -> np.ndarray | None:
    """Return the sorted classes of a training file's targets; None for a regression. Whole floats become integers.

    Args:
        column: Column of the targets.
        task: Kind of prediction: ``"classification"``, ``"regression"``, or ``"auto"``, which decides by the type of
            the column.
        where: Name of the column and its file for messages, e.g. ``"'y' of 'train.csv'"``.

    Raises:
        ConfigurationError: There is only one class.
    """
    if task == "regression" or (task == "auto" and column.dtype.kind == "f"):
        return None
    is_number = column.dtype.kind in "biuf"
    classes = np.unique(column.to_numpy() if is_number else column.astype(str).to_numpy().astype(str))
    if len(classes) < 2:
        raise ConfigurationError(f"data.target: {where} holds one value only, {classes[0]!s}")
    return classes.astype(np.int64) if classes.dtype.kind == "f" and _are_whole(classes) else classes


def without_gaps(table: DataFrame, target: str, path: str, *, drop: bool) -> DataFrame:
    """Return the rows that miss no value, and say how many others there are.

    Args:
        table: Columns that are used.
        target: Name of the column to predict. A gap makes whole numbers floats; without the gaps they are whole again.
        path: Path of the table, for messages.
        drop: Whether rows with a gap are left out.

    Raises:
        ConfigurationError: Rows miss a value and may not be left out, or every row does; the message names the column
            with the most gaps and its first row (row 1 follows the header).
    """
    gaps = table.isna()
    has_gap = gaps.any(axis=1)
    if not has_gap.any():
        return table
    if not drop or has_gap.all():
        column = gaps.sum().idxmax()
        raise ConfigurationError(
            f"data.missing: '{path}' has no value in column '{column}', row {gaps[column].to_numpy().argmax() + 1}, "
            f"and {has_gap.sum():,} of {len(table):,} rows miss one; fill them in, leave out the rows (data.missing: "
            "drop_rows), or the column (data.exclude)"
        )
    kept = table[~has_gap].reset_index(drop=True)
    lost = f"{has_gap.sum():,} of {len(table):,} rows"
    rank_zero_info(f"'{path}': {lost} miss a value and are left out (data.missing: drop_rows).")
    values = kept[target]
    if gaps[target].any() and values.dtype.kind == "f" and _are_whole(values.to_numpy()):
        kept[target] = values.astype(np.int64)
    return kept


def _are_whole(numbers: np.ndarray) -> bool:
    """Return whether all floats are whole numbers that a float64 holds exactly."""
    return bool(((np.abs(numbers) < 2**53) & (numbers == np.rint(numbers))).all())


def _check_numbers(column: Series, where: str) -> None:
    """Raise unless a column holds finite numbers that float32 can hold; the message names the first other value."""
    import pandas as pd

    if column.dtype.kind in "biuf":
        with np.errstate(over="ignore"):
            is_number = np.isfinite(column.to_numpy().astype(np.float32))
    else:
        is_number = pd.to_numeric(column.astype(str), errors="coerce").notna().to_numpy()
    if not is_number.all() or column.dtype.kind not in "biuf":
        row = int(is_number.argmin())
        raise ConfigurationError(
            f"data.features: {where} holds {str(column.iloc[row])[:40]!r} in row {row + 1}, which is no finite number; "
            "correct it, or, if the column holds names, list it in data.categorical, or leave it out (data.exclude)"
        )
