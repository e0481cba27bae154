"""Reads the tables of a run as DataFrames; a last row that is being written is left out."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import current_names
from fedbc_lightning.run.tables import complete_lines


def read_table(path: Path) -> pd.DataFrame:
    """Read the complete rows of a table, with the names that metrics have today.

    Args:
        path: The table; if there is none, the result is empty.

    Raises:
        ConfigurationError: The file is no table.
    """
    if not path.is_file():
        return pd.DataFrame()
    try:
        found = pd.read_csv(io.StringIO(complete_lines(path)))
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
    except (OSError, pd.errors.ParserError, ValueError) as error:
        raise unreadable(path, error) from None
    if "round" not in found:
        raise ConfigurationError(f"'{path}' cannot be read: there is no column 'round'.")
    return found if path.name == "clients.csv" else found.rename(columns=current_names(found.columns))


def read_text(path: Path) -> str:
    """Read a text file of a run.

    Raises:
        ConfigurationError: The file cannot be read, or is no text in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> ConfigurationError:
    """Return the error for a file of a run that cannot be read."""
    return ConfigurationError(f"'{path}' cannot be read: {' '.join(str(error).split())}.")
