"""One's own files and values in words: what is there, and what may have been meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError

FEW_VALUES = 20
"""Up to here numbers that are all whole look more like classes than like a quantity."""


def check_file(path: Path, argument: str, layout: str) -> None:
    """Raise unless there is such a file.

    Args:
        path: Of the file.
        argument: For the message, e.g. ``"path"``.
        layout: Likewise: what is expected there.

    Raises:
        ConfigurationError: There is nothing, or a folder.
    """
    if not path.is_file():
        found = "it is a folder, not a file" if path.is_dir() else "no such file"
        raise ConfigurationError(f"data.{argument}='{path}': {found}; {layout}")


def shorten(names: Sequence[str], limit: int = 10) -> str:
    """The first names, and how many more there are.

    Example:
        >>> shorten(["cat", "dog", "owl"], limit=2)
        'cat, dog and 1 more'
    """
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def are_whole(numbers: np.ndarray) -> bool:
    """Whether floats are all whole numbers, and exact as integers."""
    return bool(((np.abs(numbers) < 2**53) & (numbers == np.rint(numbers))).all())


def look_like_classes(numbers: np.ndarray) -> bool:
    """Whether floats are all whole and of few values."""
    return are_whole(numbers) and len(np.unique(numbers)) <= FEW_VALUES
