"""Checks and descriptions of the user's files and values, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError

FEW_VALUES = 20
"""Largest number of distinct values for which whole numbers look like classes and not like a quantity."""


def check_file(path: Path, argument: str, layout: str) -> None:
    """Check that a file exists.

    Args:
        path: Path of the file.
        argument: Name of the argument that gives the path, for the message, e.g. ``"path"``.
        layout: Description of the expected file, for the message.

    Raises:
        ConfigurationError: There is no file at the path, or it is a folder.
    """
    if not path.is_file():
        found = "it is a folder, not a file" if path.is_dir() else "no such file"
        raise ConfigurationError(f"data.{argument}='{path}': {found}; {layout}")


def shorten(names: Sequence[str], limit: int = 10) -> str:
    """Return a list of the first ``limit`` names, and how many more there are.

    Example:
        >>> shorten(["cat", "dog", "owl"], limit=2)
        'cat, dog and 1 more'
    """
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def are_whole(numbers: np.ndarray) -> bool:
    """Return whether all floats are whole numbers that a float64 holds exactly."""
    return bool(((np.abs(numbers) < 2**53) & (numbers == np.rint(numbers))).all())


def look_like_classes(numbers: np.ndarray) -> bool:
    """Return whether all floats are whole numbers with few distinct values."""
    return are_whole(numbers) and len(np.unique(numbers)) <= FEW_VALUES
