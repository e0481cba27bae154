"""State that outlives a round: what an algorithm declares, and where server and clients keep it.

The algorithm declares its state once; declared state is checkpointed, moved to devices, staged and exchanged between
ranks. A value that is staged in a round is current from ``commit()`` on; ``rollback()`` discards it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.core.devices import pieces
from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.metric_names import Metrics
from fedbc_lightning.core.seeding import numpy_generator
from fedbc_lightning.state import client_rows
from fedbc_lightning.state.client_rows import MemoryRows, RowStorage, ScalarRows, TableRows
from fedbc_lightning.state.file_rows import FileRows
from fedbc_lightning.state.layout import Weights

log = logging.getLogger(__name__)

# Columns that ``clients.csv`` may have for every method
COLUMNS = (
    "round", "client", "num_samples", "num_steps", "status", "train_loss", "weight", "bytes_up", "bytes_down",
    "seconds", "staleness", "hash_down", "hash_up",
)  # fmt: skip

# What a round noted of a client, which becomes a row of ``clients.csv``
Record = dict[str, Any]
Records = list[Record]

# Name of the state that holds the kept parameters: the clients' own, and at the server the initial ones
KEPT = "local_parameters"

EMPTY = torch.empty(0)


class Arrival(NamedTuple):
    """An update that arrives at the server in a round, of a method whose clients train asynchronously.

    Attributes:
        client: Index of the client.
        version: Number of updates of z when the client received it, 0..T-1.
    """

    client: int
    version: int


BufferPolicy = Literal["average", "local", "global"]


class StateDeclaration:
    """Lists the state that an algorithm keeps, by name; ``FederatedAlgorithm.declare_state`` fills it.

    Attributes:
        client_messages: What each client sends beside its model, by name, with its kind.
        scalars_of_server: Names of the clients' scalars that server parts have declared, and no client sends.
    """

    def __init__(self) -> None:
        self.client_scalars: dict[str, float | list[float]] = {}
        self.client_vectors: dict[str, str] = {}
        self.server_vectors: dict[str, tuple[float | Literal["z"], torch.dtype | None]] = {}
        self.for_clients: list[str] = []
        self.server_scalars: dict[str, float] = {}
        self.client_messages: dict[str, str] = {}
        self.scalars_of_server: list[str] = []
        self._claimed = {("server", name) for name in ("z", "buffers", "counters", KEPT)}
        self._claimed |= {("client", name) for name in COLUMNS}  # a scalar is a column of clients.csv, too

    def _claim(self, side: Literal["client", "server"], name: str) -> None:
        if (side, name) in self._claimed:
            raise ConfigurationError(f"algorithm: '{name}' ({side}) stands for something already; choose another name.")
        self._claimed.add((side, name))

    def client_scalar(self, name: str, initial: float | list[float] = 0.0) -> None:
        """Declare one float64 per client, (N,), a column of ``clients.csv``; a list gives N start values."""
        self._claim("client", name)
        self.client_scalars[name] = initial

    def client_vector(self, name: str, initial: Literal["zeros", "z"] = "zeros") -> None:
        """Declare one vector (d,) per client, which starts as zeros or as z of round 0."""
        self.client_rows(name, initial)

    def client_table(self, name: str) -> None:
        """Declare one 1-D tensor per client whose length may differ between clients; it starts empty, (0,)."""
        self.client_rows(name, "table")

    def client_model(self, name: str) -> None:
        """Declare one model (d + b,) per client, parameters and floating-point buffers; it starts as z of round 0."""
        self.client_rows(name, "model")

    def client_rows(self, name: str, kind: str) -> None:
        """Declare a row per client of a kind above, or its ``buffers``, ``counters`` or ``kept`` parameters.

        ``counters table`` are counters whose number differs between clients.
        """
        self._claim("client", name)
        self.client_vectors[name] = kind

    @property
    def table_names(self) -> list[str]:
        """Names of the clients' tables."""
        return [name for name, kind in self.client_vectors.items() if kind.endswith("table")]

    def server_vector(
        self,
        name: str,
        initial: float | Literal["z"] = 0.0,
        dtype: torch.dtype | None = None,
        *,
        for_clients: bool = True,
    ) -> None:
        """Declare one vector (d,) at the server.

        Args:
            name: Name of the vector.
            initial: Start value: a number fills the vector, ``"z"`` copies the initial model.
            dtype: Dtype of the vector; None takes the dtype of z.
            for_clients: Whether clients read it, so that it is sent to them, and counted, in every round.
        """
        self._claim("server", name)
        self.server_vectors[name] = (initial, dtype)
        self.for_clients += [name] * for_clients

    def server_scalar(self, name: str, initial: float = 0.0) -> None:
        """Declare one float64 number at the server."""
        self._claim("server", name)
        self.server_scalars[name] = initial
        self.for_clients.append(name)

    def client_message(self, name: str, kind: Literal["vector", "number", "column"] = "vector") -> None:
        """Declare what each client sends beside its model, which servers of clients elsewhere check.

        Args:
            name: Its name.
            kind: A ``vector`` (d,) or a ``number`` in ``cohort.messages``; or a ``column``, which the client's half
                gives to ``cohort.record``.
        """
        self.client_messages[name] = kind

    def fingerprint(self) -> list[str]:
        """Return the sorted names and kinds of all state, to compare a checkpoint with an algorithm."""
        groups: dict[str, Iterable[str]] = {
            "client scalar": self.client_scalars,
            "client vector": self.client_vectors,
            "server vector": self.server_vectors,
            "server scalar": self.server_scalars,
        }
        return sorted(f"{kind} {name}" for kind, names in groups.items() for name in names)


class ServerState:
    """Holds z and the state that the algorithm declared at the server; every rank has a copy.

    Attributes:
        values: Name -> tensor. ``z`` (d,), ``buffers`` (b,) and ``counters`` (integer buffers) always exist;
            ``local_parameters`` (p,), the initial ones, exists where the clients keep some.
        sampled: The clients sampled in this round, in the order of their turns.
        ids: The sampled clients that train in this round and whose messages the server uses, in the same order.
        arrivals: The updates that arrive in this round, in their order, of a method whose clients train asynchronously.
        records: One dict per sampled client of this round, its row of ``clients.csv``.
        metrics: The numbers that server callbacks log in this round, by name.
        round: Number of the current round, 1..T.
        seed: The run's seed.
        num_clients: Number of clients N that train.
        is_at_clients: Whether this is what clients know of the server, which is not what is declared as the server's.
    """

    is_at_clients = False

    def __init__(
        self,
        initial: Weights,
        declaration: StateDeclaration,
        buffer_policy: BufferPolicy = "average",
        num_clients: int = 0,
        seed: int = 0,
    ) -> None:
        self.buffer_policy = buffer_policy
        self.num_clients, self.seed, self.round = num_clients, seed, 0
        z, buffers, counters, kept = initial
        self.values: dict[str, Tensor] = {"z": z, "buffers": buffers, "counters": counters}
        if kept.numel():
            self.values[KEPT] = kept
        for name, (value, dtype) in declaration.server_vectors.items():
            # z⁰ is copied, since z is replaced and other state is not.
            start = z if value == "z" else torch.full_like(z, float(value))
            dtype = z.dtype if dtype is None or z.device.type == "mps" else dtype  # MPS has no float64
            self.values[name] = start.to(dtype, copy=True)
        for name, number in declaration.server_scalars.items():
            self.values[name] = torch.tensor(number, dtype=torch.float64)
        self._own = declaration.server_vectors.keys() - declaration.for_clients
        self._staged: dict[str, Tensor] = {}
        self._committed = self.values  # the same object but for values that were replaced in this round
        self.sampled: list[int] = []
        self.ids: list[int] = []
        self.arrivals: list[Arrival] = []
        self.records: Records = []
        self.metrics: Metrics = {}
        self._warned: set[str] = set()

    @property
    def valid_records(self) -> Records:
        """The records of the clients whose message counts, that is with the status ``ok``."""
        return [record for record in self.records if record["status"] == "ok"]

    @property
    def z(self) -> Tensor:
        """The global model (d,) that the clients received in this round."""
        return self.values["z"]

    @property
    def kept(self) -> Tensor | None:
        """The kept parameters (p,) of a client that has not trained yet; None where clients keep none."""
        return self.values.get(KEPT)

    @property
    def model(self) -> Tensor:
        """The global model (d + b,): z followed by the floating-point buffers."""
        return joined(self.z, self["buffers"])

    @property
    def staged_model(self) -> Tensor:
        """:attr:`model` as the next round will see it, (d + b,)."""
        return joined(self.staged("z"), self.staged("buffers"))

    def __getitem__(self, name: str) -> Tensor:
        """Return the committed value of a declared name.

        Raises:
            ConfigurationError: No state of this name is declared at the server, or clients ask for what they are not
                sent.
        """
        check_declared(f"server['{name}']", name, self.values)
        if self.is_at_clients and name in self._own:
            raise ConfigurationError(
                f"algorithm: clients read server['{name}'], which is declared with for_clients=False, so that they are "
                "not sent it; declare a vector of your own for them, which a part of the server stages"
            )
        return self.values[name]

    def staged(self, name: str) -> Tensor:
        """Return the value that the next round will see: the one staged in this round, or else the committed one."""
        return self._staged[name] if name in self._staged else self[name]

    def is_staged(self, name: str) -> bool:
        """Return whether ``name`` was given a value for the next round."""
        return name in self._staged

    def stage(self, name: str, value: Tensor) -> None:
        """Give ``name`` its value for the next round; the value must keep the shape and is cast to the dtype.

        Raises:
            ConfigurationError: There is no such state, or the value is no tensor of its shape.
        """
        current, call = self[name], f"server.stage('{name}', ...)"
        check_tensor(call, value, current.shape)
        # Sums are float64; z keeps its dtype, so that a checkpoint and the clients' copies hold the same bits.
        staged = value.detach().to(current.dtype, copy=True, memory_format=torch.contiguous_format)
        # A mask's -inf has no mean, difference or product with 0, but all who hold it agree on it. Only a CPU is asked
        # whether there is any: a GPU would be waited for.
        for new, now in pieces(staged.reshape(-1), current.reshape(-1)):
            if not (new.is_cpu and new.sum().isfinite()):
                new.copy_(torch.where(new.isnan() & ~now.isfinite(), now, new))
        self._staged[name] = staged

    def stage_model(self, model: Tensor) -> None:
        """Stage z and the buffers from one vector (d + b,); under the buffer policy ``global`` the buffers stay."""
        check_tensor("server.stage_model(...)", model, self.model.shape)
        z, buffers = model.tensor_split([self.z.numel()])
        self.stage("z", z)
        if self.buffer_policy != "global":
            self.stage("buffers", buffers)

    def rng(self, purpose: str, rounds_ago: int = 0) -> np.random.Generator:
        """Return a new generator that depends on (seed, purpose, round - rounds_ago) only, equal on every rank."""
        return numpy_generator(self.seed, purpose, self.round - rounds_ago)

    def log(self, name: str, value: float) -> None:
        """Log a number of this round under ``name``."""
        self.metrics[name] = value

    def warn_once(self, subject: str, text: str) -> None:
        """Log a warning, unless there was one on this subject in the run."""
        if subject not in self._warned:
            self._warned.add(subject)
            rank_zero_only(log.warning)(text)

    def replace(self, name: str, value: Tensor) -> None:
        """Replace the committed value of ``name`` for the rest of this round; a rollback restores it."""
        self.values = self.values | {name: value.to(self.values[name])}

    def commit(self) -> None:
        """Make the staged values the current ones."""
        self.values = self._committed = self.values | self._staged
        self._staged = {}

    def rollback(self) -> None:
        """Discard the values that were staged in this round, and restore those that were replaced."""
        self.values, self._staged = self._committed, {}

    def continue_from(self, other: ServerState) -> None:
        """Take over the round and all values of another state but the buffers."""
        self.round, self._warned = other.round, other._warned
        self.values |= {name: v for name, v in other.values.items() if name not in ("buffers", "counters")}

    def state_dict(self) -> dict[str, Tensor]:
        """Return CPU copies of all values but z, which the checkpoint holds under the parameters' names."""
        return {name: value.to("cpu", copy=True) for name, value in self.values.items() if name != "z"}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name, value in state.items():
            self.values[name] = value.to(self.values[name])


class ClientStore:
    """Holds the declared state of all N clients.

    The vector of a client that never trained is read as its start value and takes no memory. Vectors lie in memory and
    in the checkpoint if all of them (N times the declared sizes) take at most 64 MiB, and in the sparse file
    ``clients.bin`` otherwise; tables always lie in memory.

    Args:
        num_clients: Number of clients, N.
        declaration: The state that the algorithm declared.
        initial: The model of round 0, from which all clients start.
        dtype: Dtype in which floating-point vectors are kept; None keeps the dtype of z.

    Attributes:
        row_bytes: Bytes that the vectors of one client take where they are kept, without tables.
        names: Names of all declared client state.
        scalar_names: Names of the declared per-client scalars.
        vector_names: Names of all others.
        file_rows: The storage of the vectors if they lie in ``clients.bin``, else None.
        are_rows_elsewhere: Whether the vectors lie with the clients, so that nobody here may read or write them.
    """

    are_rows_elsewhere = False

    def __init__(
        self, num_clients: int, declaration: StateDeclaration, initial: Weights, dtype: torch.dtype | None = None
    ) -> None:
        self.num_clients = num_clients
        self._scalars = ScalarRows(
            {name: _per_client(name, value, num_clients) for name, value in declaration.client_scalars.items()}
        )
        z, buffers, counters, kept = (values.detach().to("cpu", copy=True) for values in initial)
        starts = {
            "z": z, "zeros": z.new_zeros(1).expand_as(z), "model": joined(z, buffers), "buffers": buffers,
            "counters": counters, "kept": kept, "table": torch.zeros(0, dtype=z.dtype), "counters table": counters,
        }  # fmt: skip
        kinds = self._kinds = declaration.client_vectors
        tables = TableRows({name: starts[kinds[name]] for name in declaration.table_names})
        vectors = {name: starts[kind] for name, kind in kinds.items() if name not in tables.starts}
        dtypes = {name: dtype if dtype and row.is_floating_point() else row.dtype for name, row in vectors.items()}
        self._dtypes = dtypes
        self.row_bytes = row_bytes = sum(len(row) * dtypes[name].itemsize for name, row in vectors.items())
        # By the declared sizes, not by who has trained: whether there is a file must not change during a run.
        is_in_memory = num_clients * row_bytes <= client_rows.IN_MEMORY_BELOW
        self._take(MemoryRows(vectors, dtypes) if is_in_memory else FileRows(vectors, dtypes, num_clients), tables)
        self.names, self.scalar_names = list(self._storage), list(self._scalars.starts)
        self.vector_names = self.names[len(self.scalar_names) :]

    def _take(self, vectors: MemoryRows | FileRows, tables: TableRows) -> None:
        self._vectors, self._tables = vectors, tables
        self.storages: tuple[RowStorage, ...] = (self._scalars, vectors, tables)
        self._storage = {name: storage for storage in self.storages for name in storage.starts}
        self.file_rows = vectors if isinstance(vectors, FileRows) else None

    def hold(self, clients: list[int], rows: Mapping[str, Sequence[Tensor]]) -> None:
        """Hold the rows of some clients as they are, in memory and in place of all others: those of one message."""
        # Whoever sent them has rounded them for ``trainer.client_dtype``, but for start rows, which nobody rounds.
        self._take(MemoryRows(self._vectors.starts), TableRows(self._tables.starts))
        for name, values in rows.items():
            for client, row in zip(clients, values, strict=True):
                self.stage(name, [client], row[None])

    def scalar(self, name: str, *, staged: bool = False) -> Tensor:
        """Return the scalars of all clients, (N,) float64: committed, or as the next round will see them."""
        return self._scalars.column(name, staged=staged)

    def vector(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """Return a copy of one client's row, (d,), or (d + b,) for a model: committed, or as the next round sees it."""
        return self._found(name).read(name, client, staged=staged)

    def _found(self, name: str) -> RowStorage:
        if self.are_rows_elsewhere and name in self.vector_names:
            raise ConfigurationError(
                f"algorithm: a part of the server uses '{name}' of clients, which stays with them under this "
                "trainer.backend (keeps_rows); needs_rows = True in the class of the part refuses such backends."
            )
        return self._storage[name]

    def stamp(self, name: str, client: int) -> object:
        """Return an object that is another one after another vector was staged for the client."""
        storage: Any = self._storage[name]  # a scalar has none
        return storage.stamp(name, client)

    def start(self, name: str) -> Tensor:
        """Return the row of a client that never trained."""
        return self._storage[name].starts[name]

    def row_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of one client's value: () for a scalar, (d,) or (d + b,) for a vector, None for a table."""
        return self._found(name).row_shape(name)

    def gather(self, name: str, ids: Sequence[int] | None = None, *, staged: bool = False) -> Tensor:
        """Return a copy of the state of K clients, None: of all N: a scalar (K,) float64, a vector (K, ...)."""
        return self._found(name).gather(name, range(self.num_clients) if ids is None else ids, staged=staged)

    def as_kept(self, name: str, values: Tensor) -> Tensor:
        """Round values as the store does (vectors may be kept in a smaller dtype); the result has their dtype."""
        return values.to(self._dtypes.get(name, values.dtype)).to(values.dtype)

    def stage(self, name: str, clients: list[int], values: Tensor) -> None:
        """Give the rows (K, ...) or scalars (K,) of K clients their values for the next round.

        Vectors are copied at once. Scalars are copied when they are first read or committed, so do not write into
        `values` before that.
        """
        self._found(name).stage(name, clients, values)

    def stage_all(self, name: str, values: Tensor) -> None:
        """Give the scalars of all N clients their values (N,) for the next round."""
        self._scalars.stage_all(name, values)

    def export_staged(self) -> list[dict[str, Any]]:
        """Return what was staged for the clients of this rank, to send it to another rank.

        Rows that lie in a file are not sent: all ranks share the file, so the clients' indices are enough.
        """
        return [storage.export_staged() for storage in self.storages]

    def import_staged(self, staged: list[dict[str, Any]]) -> None:
        """Stage the values that another rank exported."""
        for storage, rows in zip(self.storages, staged, strict=True):
            storage.import_staged(rows)

    def commit(self) -> None:
        """Make the staged values the current ones."""
        for storage in self.storages:
            storage.commit()

    def rollback(self) -> None:
        """Discard the staged values."""
        for storage in self.storages:
            storage.rollback()

    def state_dict(self, *, is_last: bool = True) -> dict[str, Any]:
        """Return the scalars of all clients, and the rows of the vectors or what locates them in ``clients.bin``.

        Args:
            is_last: True for ``last.ckpt``. Any other checkpoint omits the rows in the file, because later rounds
                overwrite them.
        """
        state = {"scalars": self._scalars.state_dict()}
        vectors = self._tables.state_dict()
        if self.file_rows is not None:
            # Old checkpoints of a run do not name slots: the rows there are overwritten by later rounds.
            state["file"] = self.file_rows.state_dict(with_slots=is_last)
        else:
            vectors |= self._vectors.state_dict()
        return state | {"vectors": vectors}

    def continue_from(self, other: ClientStore, buffers: Tensor, counters: Tensor) -> None:
        """Take over the state of another store in memory, whose rows lack these buffers and counters at their end."""
        state = other.state_dict()
        more = {"model": buffers.cpu(), "buffers": buffers.cpu(), "counters": counters.cpu()}
        for name, saved in state["vectors"].items():
            if self._kinds[name] in more:
                end = more[self._kinds[name]]
                saved["rows"] = torch.cat([saved["rows"], end.expand(len(saved["rows"]), -1)], dim=1)
                saved["initial"] = torch.cat([saved["initial"], end])
        self.load_state_dict(state, None, None)

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
        row = self._store.vector(name, self._client, staged=True)
        return row if row.ndim else row.item()


def joined(parameters: Tensor, buffers: Tensor) -> Tensor:
    """Return the models (..., d + b) of parameters (..., d) and buffers (..., b); without buffers nothing is copied."""
    return torch.cat([parameters, buffers], dim=-1) if buffers.numel() else parameters


def check_declared(what: str, name: str, declared: Iterable[str]) -> None:
    """Raise unless state of this name is declared; ``what`` says where it was asked for."""
    if name not in declared:
        hint = did_you_mean(str(name), declared, "declare it in declare_state")
        there = ", ".join(declared) or "none"
        raise ConfigurationError(f"algorithm: {what} is no declared state; {hint}; declared are: {there}.")


def check_tensor(call: str, value: object, shape: tuple[int, ...] | None) -> None:
    """Raise unless a value that is staged is a tensor of this shape; None allows any shape."""
    if not isinstance(value, Tensor) or (shape is not None and value.shape != shape):
        given = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        expected = "" if shape is None else f" of the shape {tuple(shape)}"
        raise ConfigurationError(f"algorithm: {call} was given {given}; give a tensor{expected}.")


def _per_client(name: str, initial: float | Iterable[float], num_clients: int) -> Tensor:
    if isinstance(initial, (int, float)):
        return torch.full((num_clients,), float(initial), dtype=torch.float64)
    values = torch.tensor(list(initial), dtype=torch.float64)
    if len(values) != num_clients:
        raise ConfigurationError(
            f"algorithm.{name}: a list of {len(values)} values for {num_clients} clients; give one number, or one each."
        )
    return values
