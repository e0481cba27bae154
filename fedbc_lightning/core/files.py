"""Files that are whole or not there, whenever the process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it atomically replaces ``path``, else it is removed and ``path`` stays."""
    partial = path.with_name(path.name + ".tmp")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # a disk that is full needs the space
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8; until all of it is written, what was there before stays."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
