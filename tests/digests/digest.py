"""Hash what a run has written: its tables, every tensor and number of its checkpoint, and its clients' rows."""

import csv
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

DESCRIPTIONS = ("fedbc_lightning/settings", "fedbc_lightning/federation/fingerprint")
"""Parts of a checkpoint that say how the run was made. They are compared with words, and are no numbers of the run."""
DRAWN_ID = re.compile(rb'(?<="id": ")[0-9a-f]+')
"""The name that ``clients.bin`` gives itself in its header, another one in each run."""
NUM_DIGITS = 12
"""Number of hexadecimal digits of a hash: a changed value keeps its hash with probability 16^-12."""


def leaves(folder: Path) -> dict[str, dict[str, str]]:
    """File -> part of it (a column, a tensor, a number) -> the hash of its name, type, shape and bytes.

    Args:
        folder: A run folder.
    """
    found = {name: dict(_table(folder / f"{name}.csv")) for name in ("clients", "metrics", "evaluation")}
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)
    found["checkpoint"] = dict(_tree(checkpoint, ""))
    rows = folder / "checkpoints" / "clients.bin"
    found["rows"] = {"content": _hash(DRAWN_ID.sub(b"", rows.read_bytes(), count=1))} if rows.exists() else {}
    return found


def digest(parts: dict[str, dict[str, str]]) -> str:
    """One hash for each file: ``clients=... metrics=...``; one without content is left out.

    Args:
        parts: What :func:`leaves` found.
    """
    return " ".join(f"{name}={_hash(repr(list(part.items())).encode())}" for name, part in parts.items() if part)


def _table(path: Path) -> Iterator[tuple[str, str]]:
    """Column -> the hash of its cells, without the columns that a clock fills."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    for name, *cells in zip(header, *rows, strict=True):
        if not name.startswith("time/"):
            yield name, _hash("\n".join(cells).encode())


def _tree(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Path -> the hash of every tensor and number below it; a path holds keys only, never the name of a class."""
    if path in DESCRIPTIONS:
        return
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        yield path, _hash(f"{value.dtype} {tuple(value.shape)} ".encode() + flat.numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tree(item, f"{path}/{key}".lstrip("/"))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tree(item, f"{path}/{index}")
    elif isinstance(value, (int, float)):
        yield path, _hash(repr(value).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:NUM_DIGITS]
