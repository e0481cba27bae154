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
    """

    def __init__(self, starts: dict[str, Tensor]) -> None:
        self.starts = starts
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
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """Give the rows of K clients their values (K, ...) for the next round; the values are copied."""
        raise NotImplementedError

    def export_staged(self) -> dict[str, Any]:
        """Return what another rank needs in order to stage the rows that were staged on this rank."""
        return self._staged

    def import_staged(self, staged: dict[str, Any]) -> None:
        """Stage the rows that another rank exported."""
        for name, rows in staged.items():
            self._staged[name] |= rows

    def commit(self) -> None:
        """Make the staged rows the current ones."""
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


class TableRows(RowStorage):
    """Keeps rows whose length differs between clients, always in memory and in the checkpoint."""

    def __init__(self, starts: dict[str, Tensor]) -> None:
        super().__init__(starts)
        self._rows: dict[str, dict[int, Tensor]] = {name: {} for name in starts}

    def row_shape(self, name: str) -> None:
        """Return None: the length differs between clients."""
        return

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """Return a copy of one client's row, committed or staged."""
        row = self._rows[name].get(client, self.starts[name])
        return (self._staged[name].get(client, row) if staged else row).clone()

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """Stage CPU copies of the rows of K clients."""
        self._staged[name].update(zip(clients, rows.detach().to("cpu", copy=True), strict=True))

    def commit(self) -> None:
        """Make the staged rows the current ones."""
        for name, rows in self._staged.items():
            self._rows[name] |= rows
        self.rollback()

    def state_dict(self) -> dict[str, Any]:
        """Return, by name, the clients that have a row of their own, and these rows."""
        return {
            name: {
                "clients": torch.tensor(sorted(rows), dtype=torch.int64),
                "rows": [rows[client] for client in sorted(rows)],
                "initial": self.starts[name],
            }
            for name, rows in self._rows.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name, rows in self._rows.items():
            saved = state[name]
            self.starts[name] = saved["initial"]
            rows.clear()
            rows.update(zip(saved["clients"].tolist(), saved["rows"], strict=True))


class MemoryRows(RowStorage):
    """Keeps rows of equal length in memory, as one matrix (N, d) per name.

    The matrix is made with ``torch.zeros``, so memory pages that were never written take no memory. Staged rows wait
    in a second matrix, in the order of staging; its memory is kept from round to round.

    Args:
        starts: Name -> 1-D row that is read for a client without a row of its own. Rows are read in its dtype.
        dtypes: Name -> dtype in which rows are kept.
        num_clients: Number of clients, N.
    """

    _staged: dict[str, dict[int, int]]  # client -> index of its row in the matrix of staged rows

    def __init__(self, starts: dict[str, Tensor], dtypes: dict[str, torch.dtype], num_clients: int) -> None:
        super().__init__(starts)
        self._rows = {name: torch.zeros(num_clients, len(row), dtype=dtypes[name]) for name, row in starts.items()}
        self._is_touched = {name: torch.zeros(num_clients, dtype=torch.bool) for name in starts}
        self._waiting = {name: rows.new_empty(0, rows.shape[1]) for name, rows in self._rows.items()}

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """Return a copy of one client's row, committed or staged."""
        start = self.starts[name]
        place = self._staged[name].get(client) if staged else None
        if place is not None:
            row = self._waiting[name][place]
        else:
            row = self._rows[name][client] if self._is_touched[name][client] else start
        return row.to(start.dtype, copy=True)

    def gather(self, name: str, clients: Sequence[int], *, staged: bool = False) -> Tensor:
        """Return a copy of the rows of K clients, (K, d), committed or staged."""
        if len(clients) == 1:
            return self.read(name, clients[0], staged=staged)[None]
        start = self.starts[name]
        rows, is_touched = self._rows[name][clients], self._is_touched[name][clients]
        # Rows that were never written are pages of zeros; what is read for them is the start row.
        rows = torch.where(is_touched[:, None], rows.to(start.dtype), start)
        found = self._staged[name] if staged else {}
        there = [k for k, client in enumerate(clients) if client in found]
        if there:
            rows[there] = self._waiting[name][[found[clients[k]] for k in there]].to(start.dtype)
        return rows

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """Append the rows (K, d) of K clients to the matrix of staged rows."""
        first, waiting = self._num_waiting[name], self._waiting[name]
        end = self._num_waiting[name] = first + len(clients)
        if end > len(waiting):
            # At least doubled, so that staging client by client copies each row a constant number of times on average.
            longer = waiting.new_empty(max(end, 2 * len(waiting)), waiting.shape[1])
            longer[:first] = waiting[:first]
            waiting = self._waiting[name] = longer
        waiting[first:end] = rows.detach()
        self._staged[name].update(zip(clients, range(first, end), strict=True))

    def commit(self) -> None:
        """Make the staged rows the current ones."""
        for name, places in self._staged.items():
            if places:
                clients = torch.tensor(list(places))
                self._rows[name][clients] = self._in_order_of_staging(name)
                self._is_touched[name][clients] = True
        self.rollback()

    def rollback(self) -> None:
        """Discard the staged rows; the memory of their matrix is kept."""
        super().rollback()
        self._num_waiting = dict.fromkeys(self.starts, 0)

    def export_staged(self) -> dict[str, Any]:
        """Return, by name, the staged clients and the matrix of their rows."""
        return {name: (list(places), self._in_order_of_staging(name)) for name, places in self._staged.items()}

    def import_staged(self, staged: dict[str, Any]) -> None:
        """Stage the rows that another rank exported."""
        for name, (clients, rows) in staged.items():
            self.stage(name, clients, rows)

    def _in_order_of_staging(self, name: str) -> Tensor:
        """Return the staged rows, one for each client."""
        places, waiting = self._staged[name], self._waiting[name]
        is_once = len(places) == self._num_waiting[name]  # otherwise a client was staged twice, and its last row counts
        return waiting[: len(places)] if is_once else waiting[list(places.values())]

    def state_dict(self) -> dict[str, Any]:
        """Return, by name, the clients that have a row of their own, and these rows as one matrix."""
        state = {}
        for name, is_touched in self._is_touched.items():
            clients = is_touched.nonzero().flatten()
            state[name] = {"clients": clients, "rows": self._rows[name][clients], "initial": self.starts[name]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; rows of another dtype are converted."""
        for name, rows in self._rows.items():
            saved = state[name]
            self.starts[name] = saved["initial"]
            self._is_touched[name].zero_()[saved["clients"]] = True
            rows[saved["clients"]] = saved["rows"].to(rows.dtype)
