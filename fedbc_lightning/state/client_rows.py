"""Where the clients' rows lie between rounds: in memory, and with the checkpoint, up to 64 MiB; above in a file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IN_MEMORY_BELOW = 64 * 2**20
"""Declared bytes of all N clients, up to which their rows lie in memory and in the checkpoint."""


class RowStorage:
    """Rows of all N clients by name. What is staged is unseen until :meth:`commit`; :meth:`rollback` forgets it.

    Args:
        starts: Name -> what a client never touched reads, 1-D. Rows are read back in its dtype.
    """

    def __init__(self, starts: dict[str, Tensor]) -> None:
        self.starts = starts
        self._staged: dict[str, dict[int, Any]] = {}
        self.rollback()

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """A copy of one client's committed row; ``staged``: as the next round will see it."""
        raise NotImplementedError

    def gather(self, name: str, clients: list[int]) -> Tensor:
        """The committed rows of K clients, (K, ...); a copy."""
        rows = [self.read(name, client) for client in clients]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """Give clients' rows (K, ...) their values for the next round; these are copied."""
        raise NotImplementedError

    def export_staged(self) -> dict[str, Any]:
        """What another rank must be told of what was staged here."""
        return self._staged

    def import_staged(self, staged: dict[str, Any]) -> None:
        """Stage what another rank exported."""
        for name, rows in staged.items():
            self._staged[name] |= rows

    def commit(self) -> None:
        """Make the staged rows the current ones."""
        raise NotImplementedError

    def rollback(self) -> None:
        """Forget what was staged."""
        self._staged = {name: {} for name in self.starts}


class TableRows(RowStorage):
    """Rows of a size of their own, in memory and in the checkpoint whatever their size."""

    def __init__(self, starts: dict[str, Tensor]) -> None:
        super().__init__(starts)
        self._rows: dict[str, dict[int, Tensor]] = {name: {} for name in starts}

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """See :class:`RowStorage`."""
        row = self._rows[name].get(client, self.starts[name])
        return (self._staged[name].get(client, row) if staged else row).clone()

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """See :class:`RowStorage`."""
        self._staged[name].update(zip(clients, rows.detach().to("cpu", copy=True), strict=True))

    def commit(self) -> None:
        """See :class:`RowStorage`."""
        for name, rows in self._staged.items():
            self._rows[name] |= rows
        self.rollback()

    def state_dict(self) -> dict[str, Any]:
        """Name -> the touched clients and their rows."""
        return {
            name: {
                "clients": torch.tensor(sorted(rows), dtype=torch.int64),
                "rows": [rows[client] for client in sorted(rows)],
                "initial": self.starts[name],
            }
            for name, rows in self._rows.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name, rows in self._rows.items():
            saved = state[name]
            self.starts[name] = saved["initial"]
            rows.clear()
            rows.update(zip(saved["clients"].tolist(), saved["rows"], strict=True))


class MemoryRows(RowStorage):
    """Rows of one size, as one matrix (N, d) per name, of which untouched pages take no memory.

    Staged rows wait in a matrix of their own, in the order of staging, whose memory is kept from round to round.

    Args:
        starts: See :class:`RowStorage`.
        dtypes: Name -> dtype in which rows are kept.
        num_clients: N.
    """

    _staged: dict[str, dict[int, int]]  # client -> place among the waiting rows

    def __init__(self, starts: dict[str, Tensor], dtypes: dict[str, torch.dtype], num_clients: int) -> None:
        super().__init__(starts)
        self._rows = {name: torch.zeros(num_clients, len(row), dtype=dtypes[name]) for name, row in starts.items()}
        self._is_touched = {name: torch.zeros(num_clients, dtype=torch.bool) for name in starts}
        self._waiting = {name: rows.new_empty(0, rows.shape[1]) for name, rows in self._rows.items()}

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """See :class:`RowStorage`."""
        start = self.starts[name]
        place = self._staged[name].get(client) if staged else None
        if place is not None:
            row = self._waiting[name][place]
        else:
            row = self._rows[name][client] if self._is_touched[name][client] else start
        return row.to(start.dtype, copy=True)

    def gather(self, name: str, clients: list[int]) -> Tensor:
        """See :class:`RowStorage`."""
        if len(clients) == 1:
            return self.read(name, clients[0])[None]
        rows, is_touched = self._rows[name][clients], self._is_touched[name][clients]
        return torch.where(is_touched[:, None], rows.to(self.starts[name].dtype), self.starts[name])

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """See :class:`RowStorage`."""
        first, waiting = self._num_waiting[name], self._waiting[name]
        end = self._num_waiting[name] = first + len(clients)
        if end > len(waiting):
            longer = waiting.new_empty(max(end, 2 * len(waiting)), waiting.shape[1])
            longer[:first] = waiting[:first]
            waiting = self._waiting[name] = longer
        waiting[first:end] = rows.detach()
        self._staged[name].update(zip(clients, range(first, end), strict=True))

    def commit(self) -> None:
        """See :class:`RowStorage`."""
        for name, places in self._staged.items():
            if places:
                clients = torch.tensor(list(places))
                self._rows[name][clients] = self._in_order_of_staging(name)
                self._is_touched[name][clients] = True
        self.rollback()

    def rollback(self) -> None:
        """See :class:`RowStorage`."""
        super().rollback()
        self._num_waiting = dict.fromkeys(self.starts, 0)

    def export_staged(self) -> dict[str, Any]:
        """See :class:`RowStorage`."""
        return {name: (list(places), self._in_order_of_staging(name)) for name, places in self._staged.items()}

    def import_staged(self, staged: dict[str, Any]) -> None:
        """See :class:`RowStorage`."""
        for name, (clients, rows) in staged.items():
            self.stage(name, clients, rows)

    def _in_order_of_staging(self, name: str) -> Tensor:
        """The staged rows, one for each client."""
        places, waiting = self._staged[name], self._waiting[name]
        is_once = len(places) == self._num_waiting[name]  # else a client was staged again
        return waiting[: len(places)] if is_once else waiting[list(places.values())]

    def state_dict(self) -> dict[str, Any]:
        """Name -> the touched clients and their rows as one matrix."""
        state = {}
        for name, is_touched in self._is_touched.items():
            clients = is_touched.nonzero().flatten()
            state[name] = {"clients": clients, "rows": self._rows[name][clients], "initial": self.starts[name]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; rows of another dtype are converted."""
        for name, rows in self._rows.items():
            saved = state[name]
            self.starts[name] = saved["initial"]
            self._is_touched[name].zero_()[saved["clients"]] = True
            rows[saved["clients"]] = saved["rows"].to(rows.dtype)
