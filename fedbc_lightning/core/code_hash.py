"""Tells which code made a run, also where it is not a release that was installed."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@cache
def code_hash() -> str:
    """Return the first 12 digits of a SHA-256 hash of all Python files of this package; it takes 10 ms.

    An installed package and its source tree have the same hash.
    """
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    for name in ("models", "datamodules"):  # in a source tree, these stand beside the package
        if not (PACKAGE / name).is_dir():
            beside = PACKAGE.parent
            files |= {path.relative_to(beside).as_posix(): path for path in (beside / name).rglob("*.py")}
    found = sha256()
    # Sorted, and with the names in the hash: file systems list in any order, and a renamed module is other code.
    for name in sorted(files):
        found.update(f"{name}\n".encode() + files[name].read_bytes())
    return found.hexdigest()[:12]
