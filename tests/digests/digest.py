"""Hash what a run has written: its tables, every tensor and number of its checkpoint, and its clients' rows."""

import csv
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedbc_lightning.core.metric_names import measured

DESCRIPTIONS = ("fedbc_lightning/settings", "fedbc_lightning/federation/fingerprint")
"""Parts of a checkpoint that say how the run was made. They are compared with words, and are no numbers of the run."""
DRAWN_ID = re.compile(rb'(?<="id": ")[0-9a-f]+')
"""The name that ``clients.bin`` gives itself in its header, another one in each run."""
COUNTS = ("num_test_samples", "num_val_samples")
"""Columns of ``evaluation.csv`` that say how many samples a client has, as the partition does."""
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
    """Column -> the hash of its cells, without the columns that a clock fills or that say what the data are."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    for name, *cells in zip(header, *rows, strict=True):
        if not name.startswith("time/") and name not in COUNTS:
            yield former_name(name), _hash("\n".join(cells).encode())


def _tree(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Path -> the hash of every tensor and number below it; a path holds keys only, never the name of a class."""
    if path in DESCRIPTIONS:
        return
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        yield path, _hash(f"{value.dtype} {tuple(value.shape)} ".encode() + flat.numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            name = former_name(key) if path.endswith("/callback_metrics") else key
            yield from _tree(item, f"{path}/{name}".lstrip("/"))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tree(item, f"{path}/{index}")
    elif isinstance(value, (int, float)):
        yield path, _hash(repr(value).encode())


OTHERS = {
    "num_clients/evaluated": "fairness/num_clients", "num_clients/nonfinite": "num_nonfinite",
    "num_clients/absent": "num_absent", "num_clients/straggler": "num_straggler",
    "server/lr": "server_lr", "server/frank_wolfe_gamma": "frank_wolfe_gamma",
}  # fmt: skip
"""Names of metrics, and those that they had when the first hashes were written."""


def former_name(name: str) -> str:
    """Return the name that a metric had before ``accuracy/global`` and its like, so that older hashes can be compared.

    Example:
        >>> former_name("train/loss"), former_name("accuracy/local_weighted"), former_name("accuracy/worst10")
        ('train_loss', 'local/test_accuracy_weighted', 'fairness/accuracy_worst10')
    """
    found = measured(name)
    if name.startswith("train/"):
        return name.replace("/", "_", 1)
    if found is None:
        return OTHERS.get(name, name)
    if found.place in ("mean", "std", "worst10", "least_data", "most_data"):
        return f"fairness/{found.metric}_{found.place}"
    place, _, weighted = found.place.partition("_")
    return f"{place}/{found.split}_{found.metric}" + (weighted and f"_{weighted}")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:NUM_DIGITS]
