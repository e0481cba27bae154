"""Writes ``metrics.csv``, ``clients.csv`` and ``evaluation.csv``; no row is ever cut off or written twice."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import open_file, read, replacing
from fedbc_lightning.core.metric_names import TRAIN_LOSS, order
from fedbc_lightning.state.declaration import Records

log = logging.getLogger(__name__)

METRICS_FIRST = ("round", TRAIN_LOSS)
CLIENTS_FIRST = ("round", "client", "num_samples", "num_steps", "status", "train_loss", "weight")
EVALUATION_FIRST = ("round", "client", "num_test_samples", "num_val_samples")


class CSVFile:
    """A CSV file with a ``round`` column to which rows are appended; it gains columns when new names occur.

    For a new name the file is rewritten with the longer header and replaced atomically. Recovery uses the ``round``
    column rather than a byte length kept elsewhere, so that such a rewrite needs no second commit point.

    Args:
        path: Path of the file.
        first: Names of the columns that stand first, in this order, if present.
        has_metrics: Whether the other columns are metrics, which stand in the order of
            :func:`~fedbc_lightning.core.metric_names.order`; otherwise they stand as they occurred. A table of metrics
            that an older version began gets the names of today when a run resumes.
    """

    def __init__(self, path: Path, first: Iterable[str], *, has_metrics: bool = False) -> None:
        self.path = path
        self._first, self._has_metrics = tuple(first), has_metrics
        self._columns: list[str] = []
        self.num_rows = 0

    def recover(self, round: int, num_rows: int | None = None) -> None:
        """Drop rows after ``round`` and a row that was cut off, read the header, and warn of missing rows.

        Args:
            round: Last round to keep.
            num_rows: Number of rows up to that round when the checkpoint was written; None if it is not known.

        Raises:
            ConfigurationError: The file was changed; the message names the line.
        """
        kept = [row for row in read_rows(self.path) if int(row["round"]) <= round]
        num_different = len({(int(row["round"]), row.get("client")) for row in kept})
        if num_different < len(kept) or num_rows not in (None, len(kept)):
            log.warning(
                "'%s' has %d of the %d rows that were there when the checkpoint was written; the run goes on, and "
                "leaves what was changed as it is.",
                *(self.path, num_different, len(kept) if num_rows is None else num_rows),
            )
        self.num_rows = len(kept)
        if self.path.is_file():
            with open_file(self.path, newline="") as file:
                self._columns = next(csv.reader(file), [])
            self._rewrite(kept)

    def append(self, rows: Records) -> None:
        """Append rows and hand them to the operating system, which keeps them even if this process dies."""
        names = {name: None for kind in dict.fromkeys(map(tuple, rows)) for name in kind}  # most rows have the same
        new = [name for name in names if name not in self._columns]
        if new:
            text = read(self.path).decode() if self._columns else ""
            self._columns = self._ordered(dict.fromkeys([*self._columns, *new]))
            self._rewrite(csv.DictReader(io.StringIO(text)))
        with open_file(self.path, "r+", newline="") as file:  # "a" would make one without header and older rows
            file.seek(0, os.SEEK_END)
            cells = [[row.get(name, "") for name in self._columns] for row in rows]
            csv.writer(file, lineterminator="\n").writerows(cells)
        self.num_rows += len(rows)

    def sync(self) -> None:
        """Wait until the file is written to the disk."""
        if self.path.is_file():
            with open_file(self.path, "rb+") as file:
                os.fsync(file.fileno())

    def _ordered(self, names: Collection[str]) -> list[str]:
        first = [name for name in self._first if name in names]
        others = [name for name in names if name not in first]
        return first + (sorted(others, key=order) if self._has_metrics else others)

    def _rewrite(self, rows: Iterable[dict[str, Any]]) -> None:
        with replacing(self.path) as partial, open_file(partial, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def complete_lines(path: Path) -> str:
    """Return the text of a table without a last line that is cut off, because it is being written; ``""`` if none.

    Raises:
        UnicodeDecodeError: What stands before it is not text in UTF-8.
    """
    content = read(path) if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1].decode()


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the complete rows of a table, none if there is no file; a last row that was cut off is left out.

    Raises:
        ConfigurationError: The file was changed; the message names the line.
    """

    def refuse(line: int, problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"'{path}', line {line}: {problem}. Was the file edited? Put the original back, or move the file away: the "
            "run then goes on with a new one, and its checkpoint is not touched."
        )

    try:
        text = complete_lines(path)
    except UnicodeDecodeError as error:
        raise refuse(error.object[: error.start].count(b"\n") + 1, "it is not text in UTF-8") from error
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next(reader, [])
    if text and (header.count("round") != 1 or len({*header}) < len(header)):
        raise refuse(1, f"it does not name columns between commas, 'round' and all others once: {text[:60]!a}")
    rows = []
    for cells in reader:
        row = dict(zip(header, cells, strict=False))
        if len(cells) != len(header) or not re.fullmatch("[0-9]+", row["round"]):
            raise refuse(reader.line_num, f"it is no row of {len(header)} cells with a whole number as its round")
        rows.append(row)
    return rows


class RunLog:
    """The three tables of a run.

    Args:
        folder: Run folder in which the tables lie.
    """

    def __init__(self, folder: Path) -> None:
        self.metrics = CSVFile(folder / "metrics.csv", METRICS_FIRST, has_metrics=True)
        self.clients = CSVFile(folder / "clients.csv", CLIENTS_FIRST)
        self.evaluation = CSVFile(folder / "evaluation.csv", EVALUATION_FIRST, has_metrics=True)
        self._tables = (self.metrics, self.clients, self.evaluation)

    @property
    def num_rows(self) -> dict[str, int]:
        """Map from the name of a file to its number of rows."""
        return {table.path.name: table.num_rows for table in self._tables}

    def recover(self, round: int, num_rows: dict[str, int]) -> None:
        """Cut all tables so that they end with ``round``.

        Args:
            round: Last round to keep.
            num_rows: Map from the name of a file to its number of rows up to that round, where it is known.
        """
        for table in self._tables:
            table.recover(round, num_rows.get(table.path.name))

    def write(self, round: int, metrics: dict[str, Any], trained: Records, evaluated: Records) -> None:
        """Write the rows of a round: its metrics, one row per sampled client, and one per evaluated client."""
        # The row of metrics comes last: where it is there, the rows of the clients are, too.
        for table, rows in ((self.clients, trained), (self.evaluation, evaluated), (self.metrics, [metrics])):
            if rows:
                table.append([{**row, "round": round} for row in rows])

    def sync(self) -> None:
        """Wait until all tables are written to the disk."""
        for table in self._tables:
            table.sync()
