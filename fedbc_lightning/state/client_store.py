"""Storage of the state that the algorithm declared for each client: scalars in memory, vectors in memory or a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.state import client_rows
from fedbc_lightning.state.client_rows import MemoryRows, RowStorage, ScalarRows, TableRows
from fedbc_lightning.state.file_rows import FileRows

EMPTY = torch.empty(0)


class DeclaredClientState(Protocol):
    """What the store needs to know of a declaration: names with start values, names with kinds, and the tables."""

    client_scalars: dict[str, float | list[float]]
    client_vectors: dict[str, str]

    @property
    def table_names(self) -> list[str]:
        """Names of the clients' tables."""
        ...


class ClientStore:
    """Holds the declared state of all N clients.

    The vector of a client that never trained is read as its start value and takes no memory. Vectors lie in memory and
    in the checkpoint if all of them (N times the declared sizes) take at most 64 MiB, and in the sparse file
    ``clients.bin`` otherwise; tables always lie in memory.

    Args:
        num_clients: Number of clients, N.
        declaration: The state that the algorithm declared.
        initial_model: z of round 0 with its buffers, (d + b,): the start value of every client model.
        initial_counters: The integer buffers of round 0.
        initial_kept: The kept parameters (p,) of round 0.
        num_parameters: Number of parameters, d.
        dtype: Dtype in which floating-point vectors are kept; None keeps the dtype of z.

    Attributes:
        row_bytes: Bytes that the vectors of one client take where they are kept, without tables.
    """

    def __init__(
        self,
        num_clients: int,
        declaration: DeclaredClientState,
        initial_model: Tensor,
        initial_counters: Tensor,
        num_parameters: int,
        dtype: torch.dtype | None = None,
        initial_kept: Tensor = EMPTY,
    ) -> None:
        self.num_clients = num_clients
        self._scalars = ScalarRows(
            {name: _per_client(name, initial, num_clients) for name, initial in declaration.client_scalars.items()}
        )
        start = initial_model.detach().cpu().clone()
        starts = {
            "model": start,
            "buffers": start[num_parameters:].clone(),
            "counters": initial_counters.detach().cpu().clone(),
            "kept": initial_kept.detach().cpu().clone(),
            "z": start[:num_parameters].clone(),
            "zeros": torch.zeros(num_parameters, dtype=start.dtype),
            "table": torch.zeros(0, dtype=start.dtype),
        }
        kinds = declaration.client_vectors
        self._tables = TableRows(dict.fromkeys(declaration.table_names, starts["table"]))
        vectors = {name: starts[kind] for name, kind in kinds.items() if kind != "table"}
        dtypes = {name: dtype if dtype and row.is_floating_point() else row.dtype for name, row in vectors.items()}
        self._dtypes = dtypes
        self.row_bytes = row_bytes = sum(len(row) * dtypes[name].itemsize for name, row in vectors.items())
        self._vectors: MemoryRows | FileRows = (
            MemoryRows(vectors, dtypes, num_clients)
            # By the declared sizes, not by who has trained: whether there is a file must not change during a run.
            if num_clients * row_bytes <= client_rows.IN_MEMORY_BELOW
            else FileRows(vectors, dtypes, num_clients)
        )
        self._storages: tuple[RowStorage, ...] = (self._scalars, self._vectors, self._tables)
        self._storage = {name: storage for storage in self._storages for name in storage.starts}

    @property
    def file_rows(self) -> FileRows | None:
        """The storage of the vectors if they lie in ``clients.bin``, else None."""
        return self._vectors if isinstance(self._vectors, FileRows) else None

    @property
    def scalar_names(self) -> list[str]:
        """Names of the declared per-client scalars."""
        return list(self._scalars.starts)

    def scalar(self, name: str) -> Tensor:
        """Return the committed scalars of all clients, (N,) float64."""
        return self._scalars.column(name)

    def vector(self, name: str, client: int) -> Tensor:
        """Return a copy of the committed row of one client, (d,), or (d + b,) for a model."""
        return self._storage[name].read(name, client)

    @property
    def names(self) -> list[str]:
        """Names of all declared client state."""
        return list(self._storage)

    def __contains__(self, name: str) -> bool:
        """Whether the algorithm declared a client state of this name."""
        return name in self._storage

    def row_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of one client's value: () for a scalar, (d,) or (d + b,) for a vector, None for a table."""
        return self._storage[name].row_shape(name)

    def gather(self, name: str, ids: list[int], device: torch.device) -> Tensor:
        """Return the committed state of K clients: a scalar as (K,) float64 on the CPU, a vector as (K, ...)."""
        rows = self._storage[name].gather(name, ids)
        return rows if name in self._scalars.starts else rows.to(device)

    def as_kept(self, name: str, values: Tensor) -> Tensor:
        """Round values as the store does (vectors may be kept in a smaller dtype); the result has their dtype."""
        return values.to(self._dtypes.get(name, values.dtype)).to(values.dtype)

    def stage(self, name: str, clients: list[int], values: Tensor) -> None:
        """Give the rows (K, ...) or scalars (K,) of K clients their values for the next round.

        Vectors are copied at once. Scalars are copied when they are first read or committed, so do not write into
        `values` before that.
        """
        self._storage[name].stage(name, clients, values)

    def stage_all(self, name: str, values: Tensor) -> None:
        """Give the scalars of all N clients their values (N,) for the next round."""
        self._scalars.stage_all(name, values)

    def export_staged(self) -> list[dict[str, Any]]:
        """Return what was staged for the clients of this rank, to send it to another rank.

        Rows that lie in a file are not sent: all ranks share the file, so the clients' indices are enough.
        """
        return [storage.export_staged() for storage in self._storages]

    def import_staged(self, staged: list[dict[str, Any]]) -> None:
        """Stage the values that another rank exported."""
        for storage, rows in zip(self._storages, staged, strict=True):
            storage.import_staged(rows)

    def staged_vector(self, name: str, client: int) -> Tensor:
        """Return a copy of one client's row as the next round will see it."""
        return self._storage[name].read(name, client, staged=True)

    def staged_vectors(self, name: str, clients: Sequence[int] | None = None) -> Tensor:
        """Return copies of K clients' rows (K, ...) as the next round will see them, on the CPU; None: of all N."""
        return self._storage[name].gather(name, range(self.num_clients) if clients is None else clients, staged=True)

    def staged_scalar(self, name: str) -> Tensor:
        """Return the scalars that the next round will see, (N,) float64."""
        return self._scalars.column(name, staged=True)

    def commit(self) -> None:
        """Make the staged values the current ones."""
        for storage in self._storages:
            storage.commit()

    def rollback(self) -> None:
        """Discard the staged values."""
        for storage in self._storages:
            storage.rollback()

    def state_dict(self, *, is_last: bool = True) -> dict[str, Any]:
        """Return the scalars of all clients, and the rows of the vectors or what locates them in ``clients.bin``.

        Args:
            is_last: True for ``last.ckpt``. Any other checkpoint omits the rows in the file, because later rounds
                overwrite them.
        """
        state: dict[str, Any] = {"scalars": self._scalars.state_dict()}
        vectors = self._tables.state_dict()
        if isinstance(self._vectors, FileRows):
            # Old checkpoints of a run do not name slots: the rows there are overwritten by later rounds.
            state["file"] = self._vectors.state_dict(with_slots=is_last)
        else:
            vectors |= self._vectors.state_dict()
        return state | {"vectors": vectors}

    def load_state_dict(self, state: dict[str, Any], checkpoint: Any, rows_path: Path | None) -> None:
        """Restore what :meth:`state_dict` returned.

        Args:
            state: A dictionary that :meth:`state_dict` returned.
            checkpoint: The path of the checkpoint that held it, for error messages.
            rows_path: The path of the ``clients.bin`` that belongs to it; None if no client has a row of its own.

        Raises:
            ConfigurationError: The rows lie elsewhere than this run expects them, or cannot be read.
        """
        if ("file" in state) != isinstance(self._vectors, FileRows):
            there, here = ("in memory", "in a file")[:: -1 if "file" in state else 1]
            raise ConfigurationError(
                f"trainer.client_dtype: the clients' rows are {there} in '{checkpoint}' and would be {here} now; give "
                "the value it was made with."
            )
        self._scalars.load_state_dict(state["scalars"])
        self._tables.load_state_dict(state["vectors"])
        if isinstance(self._vectors, FileRows):
            self._vectors.load_state_dict(state["file"], checkpoint, rows_path)
        else:
            self._vectors.load_state_dict(state["vectors"])


class StagedClient:
    """Gives one client's declared state as the next round will see it, by name: rows on the CPU, scalars as numbers."""

    def __init__(self, store: ClientStore, client: int) -> None:
        self._store, self._client = store, client

    def __getitem__(self, name: str) -> Any:
        """Return the row (a tensor on the CPU) or the number (a float) of this name."""
        row = self._store.staged_vector(name, self._client)
        return row if row.ndim else row.item()


def _per_client(name: str, initial: float | Iterable[float], num_clients: int) -> Tensor:
    if isinstance(initial, (int, float)):
        return torch.full((num_clients,), float(initial), dtype=torch.float64)
    values = torch.tensor(list(initial), dtype=torch.float64)
    if len(values) != num_clients:
        raise ConfigurationError(
            f"algorithm.{name}: a list of {len(values)} values for {num_clients} clients; give one number, or one each."
        )
    return values
