"""Columns of a table as arrays: features, targets, clients."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedbc_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

MAX_VALUES = 1000
"""Of a categorical column: each becomes a feature."""


@dataclass(frozen=True)
class Features:
    """The features of a table, as its training file defines them.

    Attributes:
        numeric: Columns taken as numbers.
        categories: Values of each categorical column in the training file, sorted.
    """

    numeric: list[str]
    categories: dict[str, np.ndarray]

    @classmethod
    def find(cls, table: DataFrame, columns: list[str], categorical: list[str], path: str) -> Features:
        """Sort columns into numeric and categorical ones.

        Raises:
            ConfigurationError: A column of text is not listed in ``categorical``, or one that is has too many values.
        """
        text = [name for name in columns if name not in categorical and table[name].dtype.kind not in "biuf"]
        if text:
            raise ConfigurationError(
                f"data.categorical: no numbers in {_join(text)} of '{path}'; list such columns in data.categorical, or "
                "leave them out of data.features"
            )
        categories = {name: np.unique(as_names(table[name])) for name in columns if name in categorical}
        for name, values in categories.items():
            if len(values) > MAX_VALUES:
                raise ConfigurationError(
                    f"data.categorical: '{name}' of '{path}' has {len(values):,} values, each of which would be a "
                    f"feature (at most {MAX_VALUES:,}); leave it out of data.features"
                )
        return cls([name for name in columns if name not in categorical], categories)

    @property
    def names(self) -> list[str]:
        """Of the features, in their order: the numeric columns, then ``column=value``."""
        return self.numeric + [f"{name}={value}" for name, values in self.categories.items() for value in values]

    def encode(self, table: DataFrame, path: str) -> np.ndarray:
        """Features float32 ``(M, F)``; a value that the training file has not is 0 in all features of its column.

        Raises:
            ConfigurationError: A value is missing, no number or not finite.
        """
        rows = np.empty((len(table), len(self.names)), dtype=np.float32)
        for position, name in enumerate(self.numeric):
            if table[name].dtype.kind not in "biuf":
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
            rows[:, start : start + len(values)] = as_names(table[name])[:, None] == values
            start += len(values)
        return rows

    def numbers(self, table: DataFrame) -> np.ndarray:
        """The numeric columns as they are in the file, float64 ``(M, ...)``."""
        return table[self.numeric].to_numpy(np.float64)


def as_names(column: Series) -> np.ndarray:
    """The values as strings ``(M,)``, so that 1, 1.0 and "1" are one name."""
    if column.dtype.kind != "f":
        return column.astype(str).to_numpy(object)
    numbers = column.to_numpy()
    whole = numbers == np.rint(numbers)
    names = column.astype(str).to_numpy(object)
    names[whole] = [str(int(number)) for number in numbers[whole]]
    return names


def find_classes(column: Series, task: str, where: str) -> np.ndarray | None:
    """The classes of a training file's targets, sorted; None of regression.

    Args:
        column: The targets.
        task: ``"classification"``, ``"regression"``, or ``"auto"``: by the type of the column.
        where: For messages, e.g. ``"'y' of 'train.csv'"``.

    Raises:
        ConfigurationError: There is one class only.
    """
    if task == "regression" or (task == "auto" and column.dtype.kind == "f"):
        return None
    classes = np.unique(_plain(column))
    if len(classes) < 2:
        raise ConfigurationError(f"data.target: {where} holds one value only, {classes[0]!s}")
    return classes


def encode_targets(column: Series, classes: np.ndarray | None, where: str) -> np.ndarray:
    """Positions among the sorted classes, int64 ``(M,)``, or of regression numbers, float32 ``(M,)``.

    Raises:
        ConfigurationError: A value is not among the classes, or no finite number.
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
            f"data.target: {where} holds the class '{values[unknown.argmax()]}', which data.path has not"
        )
    return positions.astype(np.int64)


def _plain(column: Series) -> np.ndarray:
    """Numbers or strings."""
    return column.to_numpy() if column.dtype.kind in "biuf" else column.astype(str).to_numpy().astype(str)


def check_columns(wanted: dict[str, list[str]], available: list[str], where: str) -> None:
    """Raise unless a table has the columns.

    Args:
        wanted: Names of columns by argument, e.g. ``{"target": ["y"]}``.
        available: Those of the table.
        where: For the message, e.g. ``"'train.csv'"``.

    Raises:
        ConfigurationError: One is missing; the closest ones are named.
    """
    for argument, names in wanted.items():
        for name in names:
            if name not in available:
                close = difflib.get_close_matches(str(name), available, n=3)
                hint = f"did you mean {_join(close, ' or ')}" if close else f"there are {_join(available[:20])}"
                more = f" and {len(available) - 20} more" if not close and len(available) > 20 else ""
                raise ConfigurationError(f"data.{argument}: no column '{name}' in {where}; {hint}{more}")


def check_complete(table: DataFrame, path: str) -> None:
    """Raise if a value is missing; column and row are named (row 1 follows the header)."""
    missing = table.isna().to_numpy()
    if missing.any():
        column = int(missing.any(axis=0).argmax())
        rows = np.flatnonzero(missing[:, column])
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise ConfigurationError(
            f"data: '{path}' has no value in column '{table.columns[column]}', row {rows[0] + 1}{more}; fill it in, "
            "drop the row, or leave the column out of data.features"
        )


def _join(names: list[str], word: str = ", ") -> str:
    return word.join(f"'{name}'" for name in names)
