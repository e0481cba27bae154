"""Coded messages: the codecs of a run, and the part of the channel that applies them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import generator
from fedbc_lightning.federation.channel import ChannelPart, Exchange
from fedbc_lightning.federation.user_methods import checked_bytes, read_coded
from fedbc_lightning.server import NormalizedAverage
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


class CodedMessages(ChannelPart):
    """Sends updates and z in the codes of a run's :class:`Codecs`.

    Args:
        codecs: The codecs.
    """

    def __init__(self, codecs: Codecs) -> None:
        self._up, self._down = codecs.up, codecs.down
        self._has_memory = codecs.up is not None and codecs.up.error_feedback
        self._settings = {f"trainer.codec.{name}": repr(codec) for name, codec in vars(codecs).items() if codec}

    def check(self, exchange: Exchange) -> None:
        """Refuse a method whose clients send anything but one update of the z that they have received.

        Raises:
            ConfigurationError: The method is such a one; the message names it and says why.
        """
        if not self._settings:
            return
        if self._has_memory and any(isinstance(part, NormalizedAverage) for part in exchange.server_parts):
            raise ConfigurationError(
                f"trainer.codec.up: {exchange.algorithm} divides each update by its client's number of steps, and a "
                "memory of earlier updates would be divided by that of another round; take QSGD, BFloat16 or Float8, "
                "or error_feedback: false."
            )
        problem = _problem(exchange)
        if problem:
            raise ConfigurationError(
                f"trainer.codec: {exchange.algorithm} {problem}. Take a method whose clients send one update of z: "
                "FedAvg, FedBC, FedProx, FedAdam, FedNova, MOON, Ditto, ...; or leave trainer.codec out."
            )

    def declare(self, state: StateDeclaration) -> None:
        """Declare e_i if there is error feedback."""
        if self._has_memory:
            state.client_vector(ERROR)

    def broadcast(self, z: Tensor, server: ServerState) -> Tensor:
        """Return B(z)."""
        if self._down is None:
            return z
        draws = generator(server.seed, "coded broadcast", server.round)
        return read_coded(self._down, z, draws, f"round {server.round}, broadcast")

    def send(self, updates: Tensor, cohort: Cohort, server: ServerState) -> Tensor:
        """Return C(u_i), and stage what is lost, e_i."""
        if self._up is None:
            return updates
        if self._has_memory:
            updates = updates + cohort[ERROR]
        read = updates.clone()
        # One client after another, each with draws of its own: no number depends on who else is in the cohort.
        for k in cohort.valid.nonzero()[:, 0].tolist():
            draws = generator(server.seed, "coded update", server.round, cohort.ids[k])
            read[k] = read_coded(self._up, updates[k], draws, f"client {cohort.ids[k]}, round {server.round}")
        if self._has_memory:
            errors = updates - read
            cohort.stage(ERROR, errors)
            cohort.require_finite(errors)
        return read

    def bytes(self, down: int, up: int, size: int, number_bytes: int) -> tuple[int, int]:
        """Return the bytes of the codes; buffers and scalars are no part of them."""
        if self._down is not None:
            down = checked_bytes(self._down, self._down.num_bytes(size, number_bytes))
        if self._up is not None:
            up = checked_bytes(self._up, self._up.num_bytes(size, number_bytes))
        return down, up

    def describe(self) -> dict[str, str]:
        """Return the codecs by the names of their settings."""
        return self._settings


def _problem(exchange: Exchange) -> str:
    """Return why the messages of a method cannot be coded; empty if they can."""
    algorithm, parts = exchange.algorithm, exchange.server_parts
    if algorithm.trains_pooled:
        return "trains on the data of all clients together"
    senders = [type(part).__name__ for part in parts if part.vectors_up]
    if senders or algorithm.vectors_up != 1:
        num_vectors = algorithm.vectors_up + sum(part.vectors_up for part in parts)
        return f"lets each client send {num_vectors} vectors" + (f" ({', '.join(senders)})" if senders else "")
    for part in parts:
        vectors = [name for name in part.reads if name in exchange.declaration.client_vectors]
        if vectors:
            return f"takes '{vectors[0]}' from each client by {type(part).__name__}, not its update alone"
    if not algorithm.sends_update:
        how = " (init_from: local)" if getattr(algorithm, "init_from", "") == "local" else ""
        return f"has clients that do not train from z{how}, so that they send no update of it"
    return ""
