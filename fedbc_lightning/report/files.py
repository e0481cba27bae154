"""Reads what a run left in its folder; a file that is missing is an empty table, and is told to the reader."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedbc_lightning.run.folder import TABLES
from fedbc_lightning.run.reading import read_table, read_text, unreadable
from fedbc_lightning.run.tables import read_rows

FILES = (*TABLES, "config.yaml", "partition.json")
"""Files of a run from which its page is made."""
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class RunFiles:
    """The files of a run that a page needs.

    Attributes:
        folder: Run folder.
    """

    folder: Path

    @property
    def missing(self) -> list[str]:
        """Names of the files that the run should have written and that are not there."""
        trainer = self.config.get("trainer") or {}
        is_off = 0 in (trainer.get("eval_clients"), trainer.get("eval_every_n_rounds"))
        not_asked = ["evaluation.csv"] if is_off else []
        return [name for name in FILES if not (self.folder / name).is_file() and name not in not_asked]

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
        path = self.folder / "config.yaml"
        return read_text(path) if path.is_file() else ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of ``config.yaml``."""
        try:
            content = yaml.safe_load(self.config_text) or {}
        except yaml.YAMLError as error:
            raise unreadable(self.folder / "config.yaml", error) from None
        if not isinstance(content, dict):
            raise unreadable(self.folder / "config.yaml", TypeError("it has no sections"))
        return content

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Content of ``partition.json``."""
        path = self.folder / "partition.json"
        try:
            return json.loads(read_text(path)) if path.is_file() else {}
        except ValueError as error:
            raise unreadable(path, error) from None

    @property
    def header(self) -> dict[str, str]:
        """The program's version and the hash of its code, which ``config.yaml`` names in its first lines."""
        comments = [line[1:].split() for line in self.config_text.splitlines()[:2] if line.startswith("#")]
        return {words[0]: " ".join(words[1:]) for words in comments if len(words) > 1}

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of config, partition and code, of 12 digits each."""
        config = sha256(self.config_text.encode()).hexdigest()[:12] if self.config_text else NOT_RECORDED
        partition = str(self.partition.get("hash", NOT_RECORDED))
        code = self.header.get("code", NOT_RECORDED)
        return {"config": config, "partition": partition if partition == NOT_RECORDED else partition[:12], "code": code}

    @property
    def last_round(self) -> int:
        """Last round in ``metrics.csv``; 0 if no round has ended."""
        return 0 if self.metrics.empty else int(self.metrics["round"].max())

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
