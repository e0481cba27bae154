"""Files that are whole or not there, whenever the process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another path to write to; what is there in the end takes the file's place at once, unless writing fails."""
    partial = path.with_name(path.name + ".tmp")
    yield partial
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8; until all of it is written, what was there before stays."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
