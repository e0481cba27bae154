"""Coded messages: the codecs of a run, and the part of the channel that applies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.checks import checked
from fedbc_lightning.core.errors import ConfigurationError, locate
from fedbc_lightning.core.seeding import generator
from fedbc_lightning.federation.channel import ChannelPart, Exchange
from fedbc_lightning.federation.user_methods import checked_count, returned
from fedbc_lightning.server import NormalizedAverage
from fedbc_lightning.server.codecs import Codec
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration

# Name of the client vector e_i, which holds what the messages of a client have lost so far
ERROR = "coding_error"


@checked("trainer.codec")
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
        algorithm, parts = exchange.algorithm, exchange.server_parts
        vectors = exchange.declaration.client_vectors
        takers = [type(each).__name__ for each in parts if each.vectors_up or {*vectors}.intersection(each.reads)]
        # An update divided by its client's steps (FedNova) cannot be added to a memory of other rounds.
        if self._has_memory and any(isinstance(part, NormalizedAverage) for part in parts):
            takers.append("NormalizedAverage beside error feedback")
        if takers or algorithm.trains_pooled or algorithm.vectors_up != 1 or not algorithm.sends_update:
            raise ConfigurationError(
                f"trainer.codec: clients of {algorithm} send more than one update of the z that they receive"
                f"{f' ({takers[0]})' if takers else ''}, or none. Take FedAvg, FedBC (init_from: global), FedProx, "
                "FedAdam, MOON, Ditto, ...; for FedNova a codec without error feedback; or leave trainer.codec out."
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
        return _read(self._down, z, draws, f"round {server.round}, broadcast")

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
            read[k] = _read(self._up, updates[k], draws, f"client {cohort.ids[k]}, round {server.round}")
        if self._has_memory:
            # e_i ← u_i − C(u_i): what was lost is added to the next update, without which TopK and Sign need not
            # converge.
            errors = updates - read
            cohort.stage(ERROR, errors)
            cohort.require_finite(errors)
        return read

    def bytes(self, down: int, up: int, size: int, number_bytes: int) -> tuple[int, int]:
        """Return the bytes of the codes; buffers and scalars are no part of them."""
        return _bytes(self._down, down, size, number_bytes), _bytes(self._up, up, size, number_bytes)

    def describe(self) -> dict[str, str]:
        """Return the codecs by the names of their settings."""
        return self._settings


def _read(codec: Codec, vector: Tensor, draws: torch.Generator, place: str) -> Tensor:
    """Decode a copy of ``vector`` with ``codec``, and check the result."""
    try:
        read: Any = codec.decoded(vector.clone(), draws)
    except Exception as error:
        locate(error, place)
        raise
    is_right = isinstance(read, Tensor) and (read.shape, read.dtype) == (vector.shape, vector.dtype)
    expected = f"a vector of {len(vector)} elements of {vector.dtype}, as it was given ({place})"
    return returned(codec, "decoded", read, is_right, expected, "trainer.codec").to(vector.device)


def _bytes(codec: Codec | None, uncoded: int, size: int, number_bytes: int) -> int:
    if codec is None:
        return uncoded
    return checked_count(codec, "num_bytes", codec.num_bytes(size, number_bytes), "trainer.codec")
