"""Atomic writing of files: a reader finds the old file or the new one, even if the process is killed while writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it atomically replaces ``path``, on an error it is removed."""
    partial = path.with_name(path.name + ".tmp")
    try:
        yield partial
        # POSIX replaces a name in one step, on one disk alone: so the temporary file lies in the same folder.
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # if the disk is full, the space is needed
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8; the old content stays until the new one is complete."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
