"""Columns of a table as arrays: features, targets, clients."""

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
            ConfigurationError: A column of text is not listed in ``categorical``, one that is has too many values, or
                a column of numbers holds something else, too.
        """
        text = [name for name in columns if name not in categorical and table[name].dtype.kind not in "biuf"]
        for name in text:
            _check_cells(table[name], f"'{name}' of '{path}'")
        if text:
            raise ConfigurationError(
                f"data.categorical: no numbers in {', '.join(_quote(text))} of '{path}'; list such columns in "
                "data.categorical, or leave them out of data.features"
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

        Such values are told.

        Raises:
            ConfigurationError: A value is missing, no number or not finite.
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
                    f"{len(found):,} rows, as in no row of data.path; there it stands as none of the known ones."
                )
            rows[:, start : start + len(values)] = is_value
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
    whole = np.isfinite(numbers) & (numbers == np.rint(numbers))
    names = column.astype(str).to_numpy(object)
    names[whole] = [str(int(number)) for number in numbers[whole]]
    return names


def find_classes(column: Series, task: str, where: str) -> np.ndarray | None:
    """The classes of a training file's targets, sorted, of whole floats as integers; None of regression.

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
    return classes.astype(np.int64) if classes.dtype.kind == "f" and are_whole(classes) else classes


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
                hint = f"there are {shorten(_quote(available), 20)}"
                if close:
                    hint = f"did you mean {' or '.join(_quote(close))}"
                raise ConfigurationError(f"data.{argument}: no column '{name}' in {where}; {hint}")


def check_complete(table: DataFrame, keys: list[str], path: str) -> None:
    """Raise if a value is missing; column and row are named (row 1 follows the header).

    Args:
        table: The columns that are used.
        keys: Those of target and client, which cannot be left out.
        path: For the message.

    Raises:
        ConfigurationError: One is missing.
    """
    missing = table.isna().to_numpy()
    if missing.any():
        column = int(missing.any(axis=0).argmax())
        rows = np.flatnonzero(missing[:, column])
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        name = table.columns[column]
        advice = "fill it in or drop the row"
        if name not in keys:
            advice = "fill it in, drop the row, or leave the column out of data.features"
        raise ConfigurationError(f"data: '{path}' has no value in column '{name}', row {rows[0] + 1}{more}; {advice}")


def _check_cells(column: Series, where: str) -> None:
    """Raise if most values of a column of text are numbers: the first that is none is named."""
    import pandas as pd

    is_number = pd.to_numeric(column.astype(str), errors="coerce").notna().to_numpy()
    if is_number.all():
        raise ConfigurationError(f"data.features: {where} holds its numbers as text or decimals; save them as numbers")
    if is_number.mean() >= 0.5:
        rows = np.flatnonzero(~is_number)
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise ConfigurationError(
            f"data.features: {where} is no number but {str(column.iloc[rows[0]])[:40]!r} in row {rows[0] + 1}{more}; "
            "mend it or drop the row, or, if the column holds names, list it in data.categorical"
        )


def _quote(names: Iterable[str]) -> list[str]:
    return [f"'{name}'" for name in names]
