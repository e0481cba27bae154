"""Conversion of a table's columns into arrays of features, targets and clients."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import ConfigurationError

from .findings import are_whole, shorten

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MAX_VALUES = 1000
"""Largest number of values of a categorical column, each of which becomes a feature."""


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
            ConfigurationError: A column of text is not listed in ``categorical``, a categorical column has too many
                values, or a column of numbers also holds something else.
        """
        text = [name for name in columns if name not in categorical and table[name].dtype.kind not in "biuf"]
        for name in text:
            _check_cells(table[name], f"'{name}' of '{path}'")
        if text:
            raise ConfigurationError(
                f"data.categorical: no numbers in {', '.join(_quote(text))} of '{path}'; list such columns in "
                "data.categorical, or leave them out (data.exclude)"
            )
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
        rows = np.empty((len(table), len(self.names)), dtype=np.float32)
        for position, name in enumerate(self.numeric):
            if table[name].dtype.kind not in "biuf":
                _check_cells(table[name], f"'{name}' of '{path}'")
                raise ConfigurationError(f"data.features: '{name}' of '{path}' holds no numbers")
            with np.errstate(over="ignore"):
                rows[:, position] = table[name].to_numpy()
            finite = np.isfinite(rows[:, position])
            if not finite.all():
                raise ConfigurationError(
                    f"data.features: '{name}' of '{path}' is not finite in row {finite.argmin() + 1}"
                )
        start = len(self.numeric)
        for name, values in self.categories.items():
            found = as_names(table[name])
            is_value = found[:, None] == values
            unknown = found[~is_value.any(axis=1)]
            if len(unknown):
                rank_zero_info(
                    f"'{path}': '{name}' is {shorten(_quote(np.unique(unknown)), 3)} in {len(unknown):,} of "
                    f"{len(found):,} rows, but in no row of data.path; these rows are 0 in all features of the column."
                )
            rows[:, start : start + len(values)] = is_value
            start += len(values)
        return rows

    def numbers(self, table: DataFrame) -> np.ndarray:
        """Return the numeric columns with the values of the file, float64 ``(M, len(numeric))``."""
        return table[self.numeric].to_numpy(np.float64)


def as_names(column: Series) -> np.ndarray:
    """Return the values as strings ``(M,)``; 1, 1.0 and "1" become the same name."""
    if column.dtype.kind != "f":
        return column.astype(str).to_numpy(object)
    numbers = column.to_numpy()
    whole = np.isfinite(numbers) & (numbers == np.rint(numbers))
    names = column.astype(str).to_numpy(object)
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
    classes = np.unique(_plain(column))
    if len(classes) < 2:
        raise ConfigurationError(f"data.target: {where} holds one value only, {classes[0]!s}")
    return classes.astype(np.int64) if classes.dtype.kind == "f" and are_whole(classes) else classes


def encode_targets(column: Series, classes: np.ndarray | None, where: str) -> np.ndarray:
    """Return the targets as positions among the sorted classes, int64 ``(M,)``, or as numbers, float32 ``(M,)``.

    Args:
        column: Column of the targets.
        classes: Sorted classes of the training file; None for a regression.
        where: Name of the column and its file, for messages.

    Raises:
        ConfigurationError: A value is not among the classes, or is no finite number.
    """
    values = _plain(column)
    if classes is None:
        numbers = values.astype(np.float32) if values.dtype.kind != "U" else np.empty(0)
        if not len(numbers) or not np.isfinite(numbers).all():
            raise ConfigurationError(f"data.target: {where} does not hold finite numbers only, as a regression needs")
        return numbers
    if (values.dtype.kind == "U") != (classes.dtype.kind == "U"):
        raise ConfigurationError(f"data.target: {where} holds '{values[0]}', a value of another kind than in data.path")
    positions = np.searchsorted(classes, values).clip(max=len(classes) - 1)
    unknown = classes[positions] != values
    if unknown.any():
        raise ConfigurationError(
            f"data.target: {where} holds the class '{values[unknown.argmax()]}', which does not occur in data.path"
        )
    return positions.astype(np.int64)


def _plain(column: Series) -> np.ndarray:
    """Return a column's values as an array of numbers or of strings."""
    return column.to_numpy() if column.dtype.kind in "biuf" else column.astype(str).to_numpy().astype(str)


def check_columns(wanted: dict[str, list[str]], available: list[str], where: str) -> None:
    """Check that a table has the columns that are needed.

    Args:
        wanted: Names of the columns by the argument that gives them, e.g. ``{"target": ["y"]}``.
        available: Names of the columns of the table.
        where: Name of the table for the message, e.g. ``"'train.csv'"``.

    Raises:
        ConfigurationError: A column is missing; the message suggests similar names.
    """
    for argument, names in wanted.items():
        for name in names:
            if name not in available:
                close = difflib.get_close_matches(str(name), available, n=3)
                hint = f"there are {shorten(_quote(available), 20)}"
                if close:
                    hint = f"did you mean {' or '.join(_quote(close))}"
                raise ConfigurationError(f"data.{argument}: no column '{name}' in {where}; {hint}")


def check_complete(table: DataFrame, keys: list[str], path: str) -> None:
    """Check that no value is missing.

    Args:
        table: Columns that are used.
        keys: Names of the columns of target and client, which cannot be left out.
        path: Path of the table, for the message.

    Raises:
        ConfigurationError: A value is missing; the message names column and row (row 1 follows the header).
    """
    missing = table.isna().to_numpy()
    if missing.any():
        column = int(missing.any(axis=0).argmax())
        rows = np.flatnonzero(missing[:, column])
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        name = table.columns[column]
        advice = "fill it in, or leave such rows out (data.missing: drop_rows)"
        if name not in keys:
            advice = "fill it in, leave such rows out (data.missing: drop_rows), or the column (data.exclude)"
        raise ConfigurationError(f"data: '{path}' has no value in column '{name}', row {rows[0] + 1}{more}; {advice}")


def without_gaps(table: DataFrame, target: str, path: str) -> DataFrame:
    """Return the rows that miss no value, and say how many others there are.

    Args:
        table: Columns that are used.
        target: Name of the column to predict. A gap makes whole numbers floats; without the gaps they are whole again.
        path: Path of the table, for messages.

    Raises:
        ConfigurationError: Every row misses a value.
    """
    has_gap = table.isna().any(axis=1)
    if not has_gap.any():
        return table
    kept = table[~has_gap].reset_index(drop=True)
    if not len(kept):
        emptiest = table.isna().mean().idxmax()
        raise ConfigurationError(
            f"data.missing: every row of '{path}' misses a value, most often in '{emptiest}'; leave such columns out "
            "(data.exclude)"
        )
    rank_zero_info(
        f"'{path}': {has_gap.sum():,} of {len(table):,} rows miss a value and are left out (data.missing: drop_rows)."
    )
    values = kept[target]
    if table[target].isna().any() and values.dtype.kind == "f" and are_whole(values.to_numpy()):
        kept[target] = values.astype(np.int64)
    return kept


def _check_cells(column: Series, where: str) -> None:
    """Raise if at least half of the values of a column of text are numbers; the message names the first that is not."""
    import pandas as pd

    is_number = pd.to_numeric(column.astype(str), errors="coerce").notna().to_numpy()
    if is_number.all():
        raise ConfigurationError(f"data.features: {where} holds its numbers as text or decimals; save them as numbers")
    if is_number.mean() >= 0.5:
        rows = np.flatnonzero(~is_number)
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise ConfigurationError(
            f"data.features: {where} is no number but {str(column.iloc[rows[0]])[:40]!r} in row {rows[0] + 1}{more}; "
            "correct it or drop the row, or, if the column holds names, list it in data.categorical"
        )


def _quote(names: Iterable[str]) -> list[str]:
    return [f"'{name}'" for name in names]
