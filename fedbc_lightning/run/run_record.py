"""What a run has left in its folder: tables, config and partition, each read at most once."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.run.folder import TABLES, run_folders
from fedbc_lightning.run.tables import complete_lines, read_rows

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class RunRecord:
    """A run folder; a file that is missing is an empty table, mapping or text.

    Attributes:
        folder: Run folder, such as ``runs/digits/FedBC-0``.
    """

    folder: Path

    @classmethod
    def newest(cls, experiment: Path) -> RunRecord | None:
        """Return the run of an experiment that wrote a row last; None if none has written one."""
        found = [folder for folder in run_folders(experiment) if (folder / TABLES[0]).is_file()]
        return cls(found[-1]) if found else None

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Table ``metrics.csv``, a row per round."""
        return read_table(self.folder / "metrics.csv")

    @property
    def metrics_as_written(self) -> list[dict[str, str]]:
        """Rows of ``metrics.csv`` as texts, which tell a value that is no number from one that is not there."""
        path = self.folder / "metrics.csv"
        return read_rows(path) if path.is_file() else []

    @cached_property
    def clients(self) -> pd.DataFrame:
        """Table ``clients.csv``, a row per round and sampled client."""
        return read_table(self.folder / "clients.csv")

    @cached_property
    def evaluation(self) -> pd.DataFrame:
        """Table ``evaluation.csv``, a row per round and evaluated client."""
        return read_table(self.folder / "evaluation.csv")

    @cached_property
    def config_text(self) -> str:
        """Text of ``config.yaml``."""
        return _read(self.folder / "config.yaml", str) or ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of ``config.yaml``."""
        return _read(self.folder / "config.yaml", yaml.safe_load) or {}

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Content of ``partition.json``."""
        return _read(self.folder / "partition.json", json.loads) or {}

    @property
    def missing(self) -> list[str]:
        """Names of the files that the run should have written and that are not there."""
        trainer = self.config.get("trainer") or {}
        is_off = 0 in (trainer.get("eval_clients"), trainer.get("eval_every_n_rounds"))
        expected = [*TABLES[: 2 if is_off else 3], "config.yaml", "partition.json"]
        return [name for name in expected if not (self.folder / name).is_file()]

    @property
    def versions(self) -> dict[str, str]:
        """The program's version and the hash of its code, which ``config.yaml`` names in its first lines."""
        comments = [line[1:].split() for line in self.config_text.splitlines()[:2] if line.startswith("#")]
        return {words[0]: " ".join(words[1:]) for words in comments if len(words) > 1}

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of config, partition and code, of 12 digits each."""
        config = sha256(self.config_text.encode()).hexdigest()[:12] if self.config_text else NOT_RECORDED
        partition = self.partition.get("hash")
        code = self.versions.get("code", NOT_RECORDED)
        return {"config": config, "partition": str(partition)[:12] if partition else NOT_RECORDED, "code": code}

    @property
    def last_round(self) -> int:
        """Last round in ``metrics.csv``; 0 if no round has ended."""
        return 0 if self.metrics.empty else int(self.metrics["round"].max())

    def rounds_written(self) -> int:
        """Return the last round in ``metrics.csv`` now, from the end of the file, also while the run goes on."""
        # A row is below 64 KiB; pandas would read all of a table for each look at it.
        with (self.folder / "metrics.csv").open("rb") as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - 2**16))
            rows = file.read().split(b"\n")[:-1]  # a last row without its end is being written
        round = rows[-1].partition(b",")[0] if rows else b""
        return int(round) if round.isdigit() else 0

    @property
    def max_rounds(self) -> int | None:
        """Number of rounds that the config asks for; None if it is not known."""
        return (self.config.get("trainer") or {}).get("max_rounds")

    @property
    def num_steps(self) -> int:
        """Number of local steps of all clients in all rounds."""
        return int(self.clients["num_steps"].sum()) if "num_steps" in self.clients else 0

    @property
    def num_samples(self) -> pd.Series:
        """Number of training samples by client that is not held out, the largest number first."""
        sizes = (self.partition.get("sizes") or {}).get("train")
        if sizes is not None:
            found = pd.Series(sizes).drop(self.partition.get("heldout_clients", []))
        elif {"client", "num_samples"} <= set(self.clients):
            found = self.clients.groupby("client")["num_samples"].max()
        else:
            found = pd.Series(dtype=float)
        return found.sort_values(ascending=False, kind="stable")

    def client_name(self, client: int) -> str:
        """Return the name of a client: that of the data, or else its number."""
        names = self.partition.get("client_names")
        return f"client {client}" if names is None else str(names[client])


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
        # A run that is being done may have written half of its last row.
        found = pd.read_csv(io.StringIO(complete_lines(path)))
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
    except (OSError, ValueError) as error:  # pandas' ParserError is a ValueError
        raise _unreadable(path, error) from None
    if "round" not in found:
        raise _unreadable(path, ValueError("there is no column 'round'"))
    return found


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    """Return the content of a file; None if there is no file."""
    if not path.is_file():
        return None
    try:
        content = parse(path.read_text(encoding="utf-8"))
        if parse is not str and not isinstance(content, dict):
            raise ValueError("it is no mapping")
    except (OSError, ValueError, yaml.YAMLError) as error:  # decoding errors of text and JSON are ValueErrors
        raise _unreadable(path, error) from None
    return content


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"'{path}' cannot be read: {' '.join(str(error).split())}.")
