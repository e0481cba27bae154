"""State that outlives a round: what an algorithm declares, and the server's part of it.

The algorithm declares its state once; declared state is checkpointed, moved to devices, staged and exchanged between
ranks. A value that is staged in a round is current from ``commit()`` on; ``rollback()`` discards it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.seeding import numpy_generator
from fedbc_lightning.state.client_store import ClientStore, StagedClient

__all__ = ["Arrival", "BufferPolicy", "ClientStore", "ServerState", "StagedClient", "StateDeclaration"]

# Columns that ``clients.csv`` may have for every method
COLUMNS = (
    "round", "client", "num_samples", "num_steps", "status", "train_loss", "weight", "bytes_up", "bytes_down",
    "seconds", "staleness",
)  # fmt: skip

# Name of the state that holds the kept parameters: the clients' own, and at the server the initial ones
KEPT = "local_parameters"


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
    """Lists the state that an algorithm keeps, by name; ``FederatedAlgorithm.declare_state`` fills it."""

    def __init__(self) -> None:
        self.client_scalars: dict[str, float | list[float]] = {}
        self.client_vectors: dict[str, str] = {}
        self.server_vectors: dict[str, tuple[float | Literal["z"], torch.dtype | None]] = {}
        self.server_scalars: dict[str, float] = {}
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
        self._client_rows(name, initial)

    def client_table(self, name: str) -> None:
        """Declare one 1-D tensor per client whose length may differ between clients; it starts empty, (0,)."""
        self._client_rows(name, "table")

    def client_model(self, name: str) -> None:
        """Declare one model (d + b,) per client, parameters and floating-point buffers; it starts as z of round 0."""
        self._client_rows(name, "model")

    def client_buffers(self, name: str) -> None:
        """Declare the floating-point buffers (b,) of each client, which start as those of the initial module."""
        self._client_rows(name, "buffers")

    def client_counters(self, name: str) -> None:
        """Declare the integer buffers of each client, which start as those of the initial module."""
        self._client_rows(name, "counters")

    def client_kept(self, name: str) -> None:
        """Declare the kept parameters (p,) of each client, which start as those of the initial module."""
        self._client_rows(name, "kept")

    def _client_rows(self, name: str, kind: str) -> None:
        self._claim("client", name)
        self.client_vectors[name] = kind

    @property
    def table_names(self) -> list[str]:
        """Names of the clients' tables."""
        return [name for name, kind in self.client_vectors.items() if kind == "table"]

    def server_vector(self, name: str, initial: float | Literal["z"] = 0.0, dtype: torch.dtype | None = None) -> None:
        """Declare one vector (d,) at the server.

        Args:
            name: Name of the vector.
            initial: Start value: a number fills the vector, ``"z"`` copies the initial model.
            dtype: Dtype of the vector; None takes the dtype of z.
        """
        self._claim("server", name)
        self.server_vectors[name] = (initial, dtype)

    def server_scalar(self, name: str, initial: float = 0.0) -> None:
        """Declare one float64 number at the server."""
        self._claim("server", name)
        self.server_scalars[name] = initial

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
        ids: The clients sampled in this round, in the order of sampling.
        arrivals: The updates that arrive in this round, in their order, of a method whose clients train asynchronously.
        records: One dict per sampled client of this round, its row of ``clients.csv``.
        metrics: The numbers that server callbacks log in this round, by name.
        round: Number of the current round, 1..T.
        seed: The run's seed.
        num_clients: Number of clients N that train.
    """

    def __init__(
        self,
        z: Tensor,
        buffers: Tensor,
        counters: Tensor,
        declaration: StateDeclaration,
        buffer_policy: BufferPolicy = "average",
        *,
        num_clients: int = 0,
        seed: int = 0,
        kept: Tensor | None = None,
    ) -> None:
        self.buffer_policy = buffer_policy
        self.num_clients, self.seed, self.round = num_clients, seed, 0
        self.values: dict[str, Tensor] = {"z": z, "buffers": buffers, "counters": counters}
        if kept is not None:
            self.values[KEPT] = kept
        for name, (initial, dtype) in declaration.server_vectors.items():
            # z⁰ is copied, since z is replaced and other state is not.
            start = z if initial == "z" else torch.full_like(z, float(initial))
            dtype = z.dtype if dtype is None or z.device.type == "mps" else dtype  # MPS has no float64
            self.values[name] = start.to(dtype, copy=True)
        self.values |= {
            name: torch.tensor(value, dtype=torch.float64) for name, value in declaration.server_scalars.items()
        }
        self._staged: dict[str, Tensor] = {}
        self._replaced: dict[str, Tensor] = {}
        self.ids: list[int] = []
        self.arrivals: list[Arrival] = []
        self.records: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}

    @property
    def valid_records(self) -> list[dict[str, Any]]:
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
        buffers = self.values["buffers"]
        return torch.cat([self.z, buffers]) if buffers.numel() else self.z

    @property
    def staged_model(self) -> Tensor:
        """:attr:`model` as the next round will see it, (d + b,)."""
        return torch.cat([self.staged("z"), self.staged("buffers")])

    def __getitem__(self, name: str) -> Tensor:
        """Return the committed value of a declared name.

        Raises:
            ConfigurationError: No state of this name is declared at the server.
        """
        check_declared(f"server['{name}']", name, self.values)
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
        self._staged[name] = value.to(current.dtype)

    def stage_model(self, model: Tensor) -> None:
        """Stage z and the buffers from one vector (d + b,); under the buffer policy ``global`` the buffers stay."""
        check_tensor("server.stage_model(...)", model, self.model.shape)
        z, buffers = model.split([self.z.numel(), model.numel() - self.z.numel()])
        self.stage("z", z)
        if self.buffer_policy != "global":
            self.stage("buffers", buffers)

    def rng(self, purpose: str, rounds_ago: int = 0) -> np.random.Generator:
        """Return a new generator that depends on (seed, purpose, round - rounds_ago) only, equal on every rank."""
        return numpy_generator(self.seed, purpose, self.round - rounds_ago)

    def log(self, name: str, value: float) -> None:
        """Log a number of this round under ``name``."""
        self.metrics[name] = value

    def replace(self, name: str, value: Tensor) -> None:
        """Replace the committed value of ``name`` for the rest of this round; a rollback restores it."""
        # The first value is kept: a hook may write several times in a round.
        self._replaced.setdefault(name, self.values[name])
        self.values[name] = value.to(self.values[name])

    def commit(self) -> None:
        """Make the staged values the current ones."""
        self.values |= self._staged
        self._staged, self._replaced = {}, {}

    def rollback(self) -> None:
        """Discard the values that were staged in this round, and restore those that were replaced."""
        self.values |= self._replaced
        self._staged, self._replaced = {}, {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return CPU copies of all values but z, which the checkpoint holds under the parameters' names."""
        return {name: value.to("cpu", copy=True) for name, value in self.values.items() if name != "z"}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name, value in state.items():
            self.values[name] = value.to(self.values[name])


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
