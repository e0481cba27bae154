"""Reading of tables from CSV, TSV and Parquet files."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbc_lightning.core.errors import ConfigurationError

from .findings import check_file

if TYPE_CHECKING:
    from pandas import DataFrame

SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
SEPARATOR_NAMES = {";": "';'", "\t": "tabs", "|": "'|'", ",": "commas"}
PARQUET = (".parquet", ".pq")
COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
LAYOUT = (
    "expected a .csv (commas) or .tsv (tabs) file with a header line, also .gz, .bz2, .xz or .zip, or a .parquet file"
)
MISSING = ["", "#N/A", "NA", "N/A", "n/a", "<NA>", "NaN", "nan", "-nan", "null", "NULL", "None"]
"""Fields that mean a missing value in a numeric column of a CSV or TSV file.

In a column of names only the empty field does.
"""

DAMAGED = (OSError, EOFError, ValueError, RuntimeError, lzma.LZMAError, zlib.error)
"""Exceptions that pandas and pyarrow raise for a damaged file; their own classes derive from ValueError."""


def read_names(path: Path, argument: str) -> list[str]:
    """Return the names of a table's columns, without reading its rows.

    Columns without a name, such as a saved index, are left out.

    Args:
        path: Path of the file.
        argument: Name of the argument that gives the path, for messages, e.g. ``"path"``.

    Raises:
        ConfigurationError: The file is missing, damaged or of an unknown kind, or it has another separator.
    """
    check_file(path, argument, LAYOUT)
    if _kind(path, argument) in PARQUET:
        parquet = _import_parquet(path, argument)
        try:
            names = parquet.read_schema(path).names
        except DAMAGED as error:
            raise _refuse(path, argument, error) from None
        return [name for name in names if not name.startswith("__index_level_")]
    names = [name for name in _read_csv(path, argument, nrows=0).columns if not name.startswith("Unnamed: ")]
    own = SEPARATOR_NAMES[SEPARATORS[_kind(path, argument)]]
    for separator, shown in SEPARATOR_NAMES.items():
        if len(names) == 1 and separator in names[0]:
            raise ConfigurationError(
                f"data.{argument}='{path}': its columns are separated by {shown}; save it with {own}"
            )
    header = _read_csv(path, argument, nrows=1, header=None, dtype=str, keep_default_na=False)
    written = [name for name in (header.iloc[0] if len(header) else []) if name]
    _refuse_twice(written, written, path, argument)  # pandas renames the second one
    return names


def read_table(path: Path, columns: list[str], argument: str, names: Collection[str] = ()) -> DataFrame:
    """Read columns of a table, in the given order.

    Args:
        path: Path of the file.
        columns: Names of the columns to read.
        argument: Name of the argument that gives the path, for messages, e.g. ``"path"``.
        names: Names of those columns that hold names; their fields in CSV and TSV files are taken as they are written.
            Columns of Parquet files have the types of the file.

    Raises:
        ConfigurationError: The file is damaged.
    """
    if _kind(path, argument) not in PARQUET:
        as_text = [name for name in columns if name in names]
        options = {
            "dtype": dict.fromkeys(as_text, str),
            "keep_default_na": False,
            "na_values": {name: [""] if name in as_text else MISSING for name in columns},
        }
        return _read_csv(path, argument, **options)[columns]  # with usecols, pandas would overlook lines too long
    parquet = _import_parquet(path, argument)
    try:
        with parquet.ParquetFile(path) as file:
            _refuse_twice(columns, list(file.schema_arrow.names), path, argument)
            table = file.read(columns=columns)
    except ConfigurationError:
        raise
    except DAMAGED as error:
        raise _refuse(path, argument, error) from None
    return table.to_pandas(ignore_metadata=True)[columns]  # with the metadata, a saved index would not be a column


def _read_csv(path: Path, argument: str, **options: Any) -> DataFrame:
    import pandas as pd  # takes half a second to import

    try:
        separator = SEPARATORS[_kind(path, argument)]
        table = pd.read_csv(path, sep=separator, encoding="utf-8-sig", low_memory=False, **options)
    except DAMAGED as error:
        raise _refuse(path, argument, error) from None
    if not isinstance(table.index, pd.RangeIndex):  # pandas takes the first fields of longer lines for an index
        raise ConfigurationError(f"data.{argument}='{path}': its lines have more fields than its header; {LAYOUT}")
    return table


def _kind(path: Path, argument: str) -> str:
    """Return the ending of the path that tells the format, without that of a compression."""
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in COMPRESSED:
        endings.pop()
    kind = endings[-1] if endings else ""
    if kind not in (*SEPARATORS, *PARQUET):
        raise ConfigurationError(f"data.{argument}='{path}': unknown kind of file; {LAYOUT}")
    return kind


def _import_parquet(path: Path, argument: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigurationError(
            f"data.{argument}='{path}': Parquet files need pyarrow; pip install 'fedbc-lightning[parquet]'"
        ) from None
    return parquet


def _refuse_twice(columns: list[str], names: list[str], path: Path, argument: str) -> None:
    twice = next((name for name in columns if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"data.{argument}='{path}': it has two columns '{twice}'; rename one")


def _refuse(path: Path, argument: str, error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigurationError(f"data.{argument}='{path}': cannot be read ({reason}); {LAYOUT}")
