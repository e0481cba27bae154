"""Conversion of a table's columns into arrays of features, targets and clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import ConfigurationError

from .own_rows import shorten

if TYPE_CHECKING:
    from pandas import DataFrame, Series

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
    rank_zero_info(
        f"'{path}': {has_gap.sum():,} of {len(table):,} rows miss a value and are left out (data.missing: drop_rows)."
    )
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
