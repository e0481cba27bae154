"""Messages that are coded: which codecs a run has, what it refuses, and where they stand in a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import generator
from fedbc_lightning.federation.user_methods import checked_bytes, read_coded
from fedbc_lightning.server import NormalizedAverage, ServerCallback
from fedbc_lightning.server.codecs import Codec, check_codec
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState, StateDeclaration

ERROR = "coding_error"
"""Name of the client vector e_i, which holds what the messages of a client have lost so far."""


@dataclass(frozen=True)
class Codecs:
    """Codes what clients send and receive into fewer bytes; the bytes in tables and plans are those of the code.

    In a round, with codecs C for updates and B for the broadcast::

        server    sends B(z)
        client    trains w_i from B(z), to which the method's terms refer, too;  u_i = w_i − B(z) + e_i
                  sends C(u_i), and keeps  e_i ← u_i − C(u_i)  if C has error feedback; else e_i = 0
        server    goes on as if the client had sent  z + C(u_i)

    So z itself is never rounded, and steps that are too short for B are not lost (Philippenko and Dieuleveut 2021 call
    that a preserved central model). Buffers and scalars travel as they are.

    Attributes:
        up: Codec of the clients' updates, e.g. ``TopK``; None: they are sent as they are.
        down: Codec of z on its way to the clients, e.g. ``BFloat16``; None: it is sent as it is.

    Raises:
        ConfigurationError: A value is no codec, or ``down`` is one in which a model cannot be sent.

    References:
        Basu et al. 2019, "Qsparse-local-SGD", Algorithm 1; Philippenko and Dieuleveut 2021, "Preserved central model
        for faster bidirectional compression in distributed settings".
    """

    up: Codec | None = None
    down: Codec | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_codec("trainer.codec.up", self.up)
        check_codec("trainer.codec.down", self.down)
        if self.down is not None and not self.down.is_for_models:
            raise ConfigurationError(
                f"trainer.codec.down: what {type(self.down).__name__} leaves of z is no model, and the server has no "
                "memory of what each client has received before; give QSGD, BFloat16 or Float8."
            )

    def check(
        self, parts: Sequence[ServerCallback], algorithm: FederatedAlgorithm, declaration: StateDeclaration
    ) -> None:
        """Refuse a method whose clients send anything but one update of the z that they have received.

        Args:
            parts: The server's parts.
            algorithm: The method.
            declaration: The state that the method and its parts keep.

        Raises:
            ConfigurationError: The method is such a one; the message names it and says why.
        """
        problem = _problem(parts, algorithm, declaration)
        if self.has_memory and any(isinstance(part, NormalizedAverage) for part in parts):
            raise ConfigurationError(
                f"trainer.codec.up: {algorithm} divides each update by its client's number of steps, and a memory of "
                "earlier updates would be divided by that of another round; take QSGD, BFloat16 or Float8, or "
                "error_feedback: false."
            )
        if self != Codecs() and problem:
            raise ConfigurationError(
                f"trainer.codec: {algorithm} {problem}. Take a method whose clients send one update of z: FedAvg, "
                "FedBC, FedProx, FedAdam, FedNova, MOON, Ditto, ...; or leave trainer.codec out."
            )

    @property
    def has_memory(self) -> bool:
        """Whether each client keeps what its messages have lost."""
        return self.up is not None and self.up.error_feedback

    def declare(self, declaration: StateDeclaration) -> None:
        """Declare e_i if there is error feedback."""
        if self.has_memory:
            declaration.client_vector(ERROR)

    def broadcast(self, server: ServerState) -> Tensor:
        """Return the z (d,) that the clients of the server's round receive."""
        if self.down is None:
            return server.z
        draws = generator(server.seed, "coded broadcast", server.round)
        return read_coded(self.down, server.z, draws, f"round {server.round}, broadcast")

    def send(self, cohort: Cohort, server: ServerState, received: Tensor) -> None:
        """Replace the models w_i of a cohort that has trained by what the server reads, z + C(u_i), and stage e_i.

        Clients that are not valid send nothing that counts, and keep e_i.

        Args:
            cohort: The clients; its ``w`` becomes a new tensor, so that rows that were staged from it stay.
            server: State of the server.
            received: The z (d,) from which the clients have trained.
        """
        if self == Codecs():
            return
        sent = cohort.w.clone()
        errors = cohort[ERROR].clone() if self.has_memory else None
        for k in cohort.valid.nonzero()[:, 0].tolist():  # one by one: no number depends on who else is in the cohort
            update = cohort.w[k] - received
            if errors is not None:
                update += errors[k]
            read = update
            if self.up is not None:
                draws = generator(server.seed, "coded update", server.round, cohort.ids[k])
                read = read_coded(self.up, update, draws, f"client {cohort.ids[k]}, round {server.round}")
            if errors is not None:
                errors[k] = update - read
            sent[k] = server.z + read
        cohort.w = sent
        cohort.require_finite(sent)
        if errors is not None:
            cohort.stage(ERROR, errors)
            cohort.require_finite(errors)

    def num_bytes(self, size: int, number_bytes: int) -> tuple[int, int]:
        """Return the bytes of z on its way to a client, and those of a client's update.

        Args:
            size: Number d of elements of a vector.
            number_bytes: Bytes of one number in the precision of z.
        """
        down, up = (
            size * number_bytes if codec is None else checked_bytes(codec, codec.num_bytes(size, number_bytes))
            for codec in (self.down, self.up)
        )
        return down, up

    def describe(self) -> dict[str, str]:
        """Return what must stay the same in a run, by the name of its setting."""
        return {f"trainer.codec.{name}": repr(codec) for name, codec in vars(self).items() if codec is not None}


@contextmanager
def received_by_clients(server: ServerState, received: Tensor) -> Iterator[None]:
    """Show ``received`` (d,) as the server's z to what the clients do inside this context."""
    kept, server.values["z"] = server.z, received
    try:
        yield
    finally:
        server.values["z"] = kept


def _problem(parts: Sequence[ServerCallback], algorithm: FederatedAlgorithm, declaration: StateDeclaration) -> str:
    """Return why the messages of a method cannot be coded; empty if they can."""
    if algorithm.trains_pooled:
        return "trains on the data of all clients together"
    senders = [type(part).__name__ for part in parts if part.vectors_up]
    if senders or algorithm.vectors_up != 1:
        num_vectors = algorithm.vectors_up + sum(part.vectors_up for part in parts)
        return f"lets each client send {num_vectors} vectors" + (f" ({', '.join(senders)})" if senders else "")
    for part in parts:
        vectors = [name for name in part.reads if name in declaration.client_vectors]
        if vectors:
            return f"takes '{vectors[0]}' from each client by {type(part).__name__}, not its update alone"
    if not algorithm.sends_update:
        how = " (init_from: local)" if getattr(algorithm, "init_from", "") == "local" else ""
        return f"has clients that do not train from z{how}, so that they send no update of it"
    return ""
