"""Storage of the clients' rows between rounds, in memory and in the checkpoint; used up to 64 MiB.

Larger state lies in a file, see :mod:`fedbc_lightning.state.file_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Largest number of declared bytes, of all N clients together, that is kept in memory and in the checkpoint
IN_MEMORY_BELOW = 64 * 2**20


class RowStorage:
    """Holds the rows of all N clients by name.

    A staged row cannot be read as a committed one until :meth:`commit`; :meth:`rollback` discards it.

    Args:
        starts: Name -> 1-D row that is read for a client without a row of its own. Rows are read in its dtype.
        dtypes: Name -> dtype in which rows are kept, where it is not that of the start row.

    Attributes:
        starts: The argument of this name.
    """

    def __init__(self, starts: dict[str, Tensor], dtypes: dict[str, torch.dtype] | None = None) -> None:
        self.starts = starts
        self._dtypes = {name: row.dtype for name, row in starts.items()} | (dtypes or {})
        self._staged: dict[str, dict[int, Any]] = {}
        self.rollback()

    def row_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of one client's row; None if it differs between clients."""
        return tuple(self.starts[name].shape)

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """Return a copy of one client's committed row; with ``staged=True``, the row that the next round will see."""
        raise NotImplementedError

    def gather(self, name: str, clients: Sequence[int], *, staged: bool = False) -> Tensor:
        """Return a copy of the rows of K clients, (K, ...), committed or staged."""
        rows = [self.read(name, client, staged=staged) for client in clients]
        return torch.stack(rows) if len(rows) > 1 else rows[0][None]

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """Give the rows of K clients their values (K, ...) for the next round; the values are copied."""
        # Copies: a view of one row of a large cohort would keep the memory of all others.
        copies = map(Tensor.clone, rows.detach().to("cpu", self._dtypes[name]))
        self._staged[name].update(zip(clients, copies, strict=True))

    def export_staged(self) -> dict[str, Any]:
        """Return what another rank needs in order to stage the rows that were staged on this rank."""
        return self._staged

    def import_staged(self, staged: dict[str, Any]) -> None:
        """Stage the rows that another rank exported."""
        for name, rows in staged.items():
            self._staged[name] |= rows

    def commit(self) -> None:
        """Make the staged rows the current ones; the containers that hold those before are replaced, not written."""
        raise NotImplementedError

    def rollback(self) -> None:
        """Discard the staged rows."""
        self._staged = {name: {} for name in self.starts}


class ScalarRows(RowStorage):
    """Keeps one number per client, always in memory and in the checkpoint, as (N,) float64 per name.

    Staged numbers may lie on a GPU. They are copied when they are first read or committed: once per round, and not once
    per cohort, because the processor waits for the GPU each time.

    Args:
        columns: Name -> numbers of all clients before round 1, (N,) float64.
    """

    _staged: dict[str, dict[int, None]]  # the clients with staged numbers, in the order of staging

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._columns = dict(columns)
        super().__init__({name: torch.zeros((), dtype=torch.float64) for name in columns})

    def column(self, name: str, *, staged: bool = False) -> Tensor:
        """Return the numbers of all clients, (N,) float64: the committed ones, or the staged ones."""
        committed = self._columns[name]
        if not staged:
            return committed
        # All staged numbers in one copy from the device: each copy waits for it.
        waiting = self._waiting.pop(name, None)
        if waiting:
            clients = [client for some, _ in waiting for client in some]
            values = torch.cat([values.detach() for _, values in waiting]).to("cpu", torch.float64)
            self._next.setdefault(name, committed.clone()).numpy()[clients] = values.numpy()
        return self._next.get(name, committed)

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """Return a copy of one client's number, committed or staged, as a tensor without dimensions."""
        return self.column(name, staged=staged)[client].clone()

    def gather(self, name: str, clients: Sequence[int], *, staged: bool = False) -> Tensor:
        """Return a copy of the numbers of K clients, (K,), committed or staged."""
        return torch.from_numpy(self.column(name, staged=staged).numpy()[clients])

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """Note the numbers (K,) of K clients; they are copied later."""
        self._staged[name].update(dict.fromkeys(clients))
        self._waiting.setdefault(name, []).append((clients, rows))

    def stage_all(self, name: str, values: Tensor) -> None:
        """Give all N clients their numbers (N,) for the next round, the same on every rank."""
        self._waiting.pop(name, None)
        self._next[name] = values

    def export_staged(self) -> dict[str, Any]:
        """Return, by name, the clients that were staged one by one, and their numbers."""
        return {
            name: (list(clients), self.column(name, staged=True)[list(clients)])
            for name, clients in self._staged.items()
            if clients
        }

    def import_staged(self, staged: dict[str, Any]) -> None:
        """Stage the numbers that another rank exported."""
        for name, (clients, values) in staged.items():
            self.stage(name, clients, values)

    def commit(self) -> None:
        """Make the staged numbers the current ones."""
        self._columns = {name: self.column(name, staged=True) for name in self._columns}
        self.rollback()

    def rollback(self) -> None:
        """Discard the staged numbers."""
        super().rollback()
        self._next: dict[str, Tensor] = {}
        self._waiting: dict[str, list[tuple[list[int], Tensor]]] = {}  # staged, and not yet copied

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the numbers of all clients, by name."""
        return {name: column.clone() for name, column in self._columns.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._columns |= state


class MemoryRows(RowStorage):
    """Keeps rows in memory and in the checkpoint; a client that never trained has none and takes no memory."""

    def __init__(self, starts: dict[str, Tensor], dtypes: dict[str, torch.dtype] | None = None) -> None:
        super().__init__(starts, dtypes)
        self._rows: dict[str, dict[int, Tensor]] = {name: {} for name in starts}

    def _find(self, name: str, client: int, *, staged: bool) -> Tensor:
        row = self._rows[name].get(client, self.starts[name])
        return self._staged[name].get(client, row) if staged else row

    def stamp(self, name: str, client: int) -> object:
        """Return the staged row itself."""
        return self._find(name, client, staged=True)

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """Return a copy of one client's row, committed or staged."""
        return self._find(name, client, staged=staged).to(self.starts[name].dtype, copy=True)

    def gather(self, name: str, clients: Sequence[int], *, staged: bool = False) -> Tensor:
        """Return a copy of the rows of K clients, (K, d), committed or staged."""
        rows = [self._find(name, client, staged=staged) for client in clients]
        return (torch.stack(rows) if rows else self.starts[name][None][:0]).to(self.starts[name].dtype)

    def commit(self) -> None:
        """Make the staged rows the current ones."""
        self._rows = {name: self._rows[name] | rows for name, rows in self._staged.items()}
        self.rollback()

    def state_dict(self) -> dict[str, Any]:
        """Return, by name, the clients that have a row of their own, and these rows."""
        return {
            name: {
                "clients": torch.tensor(sorted(rows), dtype=torch.int64),
                "rows": self._together(name, [rows[client] for client in sorted(rows)]),
                "initial": self.starts[name],
            }
            for name, rows in self._rows.items()
        }

    def _together(self, name: str, rows: list[Tensor]) -> Any:
        """Return the rows as a checkpoint holds them: a matrix."""
        return torch.stack(rows) if rows else torch.empty(0, len(self.starts[name]), dtype=self._dtypes[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; rows of another dtype are converted."""
        for name in self._rows:
            saved = state[name]
            self.starts[name] = saved["initial"]
            rows = (row.to(self._dtypes[name], copy=True) for row in saved["rows"])
            self._rows[name] = dict(zip(saved["clients"].tolist(), rows, strict=True))


class TableRows(MemoryRows):
    """Keeps rows whose length differs between clients."""

    def row_shape(self, name: str) -> None:
        """Return None: the length differs between clients."""
        return

    def _together(self, name: str, rows: list[Tensor]) -> list[Tensor]:
        return rows
