"""Reads what clients can do from CSV files: seconds, bytes per second, and intervals in which they are there."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean, nearest
from fedbc_lightning.core.seeding import numpy_generator

FEDSCALE = ("computation", "communication")
"""Columns of FedScale's device traces, which may have others beside them."""
SPEEDS = ("client", "compute", "bandwidth_up", "bandwidth_down", *FEDSCALE)
INTERVALS = ("client", "start", "end")


class DeviceFile:
    """The rows of a CSV file about clients, or about devices that clients may have.

    A column that nobody reads is refused, since a misspelt ``client`` would otherwise deal the rows to any client.
    Files in FedScale's form may have others, but none that is spelt almost like ``client``.

    Args:
        where: Setting that names the file, for messages.
        path: The file.
        num_clients: Number of clients N of the data.
        names: Names of the clients, which may stand in the column ``client`` in place of their numbers.

    Raises:
        ConfigurationError: The file cannot be read, has no rows, or has a column twice.
    """

    def __init__(self, where: str, path: str | Path, num_clients: int, names: Sequence[str] | None) -> None:
        self._where, self._path, self._num_clients = where, path, num_clients
        self._places = {name: place for place, name in enumerate(names or ())}
        try:
            with Path(path).open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file, skipinitialspace=True)
                self.columns = list(reader.fieldnames or ())
                self._rows = [(reader.line_num, row) for row in reader]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigurationError(
                f"{where}: '{path}' cannot be read as a CSV file ({getattr(error, 'strerror', None) or error}); give "
                "the path of a file, or numbers."
            ) from error
        twice = next((name for name in self.columns if self.columns.count(name) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"{where}: '{path}' has the column '{twice}' twice; leave one out.")
        if not self._rows:
            raise ConfigurationError(f"{where}: '{path}' has no rows below its header.")
        for line, row in self._rows:
            if None in row:
                raise self._wrong(line, "there are more cells than columns")

    def column(self, factors: Mapping[str, float], seed: int) -> np.ndarray:
        """Return a number > 0 for each of the N clients; NaN where the file says nothing of a client.

        Without a column ``client`` the rows are devices, one of which is drawn for each client from the seed; equal
        files give a client the same device for all settings.

        Args:
            factors: Map from the columns that may hold the numbers, the first wins, to the factors of their units.
            seed: Seed of the run.

        Raises:
            ConfigurationError: No such column is there, a column is unknown, or a cell is no positive number or
                client.
        """
        name = next((name for name in factors if name in self.columns), None)
        if name is None:
            raise ConfigurationError(
                f"{self._where}: '{self._path}' has no column {' or '.join(factors)}, but {', '.join(self.columns)}."
            )
        self._check_columns(SPEEDS)
        values = factors[name] * np.array([self._number(line, row, name, strict=True) for line, row in self._rows])
        if "client" not in self.columns:
            return values[numpy_generator(seed, "devices").integers(len(values), size=self._num_clients)]
        found = np.full(self._num_clients, np.nan)
        for (line, row), value in zip(self._rows, values.tolist(), strict=True):
            client = self._client(line, row)
            if not math.isnan(found[client]):
                raise self._wrong(line, f"client {row['client']} is there twice")
            found[client] = value
        return found

    def intervals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return client, start and end of each row, with 0 ≤ start < end.

        Raises:
            ConfigurationError: A column is missing or unknown, or a cell is no such number or client.
        """
        missing = [name for name in INTERVALS if name not in self.columns]
        if missing:
            raise ConfigurationError(
                f"{self._where}: '{self._path}' has no column {missing[0]}, but {', '.join(self.columns)}; give "
                "client, start and end."
            )
        self._check_columns(INTERVALS)
        clients = np.array([self._client(line, row) for line, row in self._rows])
        starts, ends = (np.array([self._number(line, row, name) for line, row in self._rows]) for name in INTERVALS[1:])
        empty = np.flatnonzero(ends <= starts)
        if len(empty):
            raise self._wrong(self._rows[empty[0]][0], "the end is not after the start")
        return clients, starts, ends

    def _check_columns(self, known: Sequence[str]) -> None:
        may_have_others = any(name in FEDSCALE for name in self.columns)
        for name in self.columns:
            if name in known or (may_have_others and nearest(name.strip(), ["client"]) is None):
                continue
            meant = did_you_mean(name.strip(), known, f"there may be {', '.join(known)}")
            raise ConfigurationError(f"{self._where}: '{self._path}' has an unknown column '{name}'; {meant}")

    def _number(self, line: int, row: dict[str, str], name: str, *, strict: bool = False) -> float:
        try:
            value = float(row[name])
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and (value > 0 if strict else value >= 0)):
            raise self._wrong(line, f"{name} is {row[name]!r}; give a number {'>' if strict else '>='} 0")
        return value

    def _client(self, line: int, row: dict[str, str]) -> int:
        said = (row["client"] or "").strip()
        if said in self._places:
            return self._places[said]
        if said.isdecimal() and int(said) < self._num_clients:
            return int(said)
        known = f"the data has clients 0 to {self._num_clients - 1}"
        hint = did_you_mean(said, self._places, known) if self._places else known
        raise self._wrong(line, f"there is no client {said!r}; {hint}")

    def _wrong(self, line: int, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self._where}: '{self._path}', line {line}: {problem}.")
