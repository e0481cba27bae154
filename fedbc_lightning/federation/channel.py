"""The channel between server and clients: an ordered list of parts that every message passes.

In a round, with the parts P_1, ..., P_n of a channel, in order::

    server    sends  z' = P_n.broadcast(... P_1.broadcast(z))
    client i  trains w_i from z', and sends  Δ_i = P_n.send(... P_1.send(w_i − z'))
    server    goes on as if client i had sent  z + Δ_i,  and adds it to the sums of the round;
              P_n.receive, ..., P_1.receive  then change the sums, before z is formed of them

A *message* is such a z' or Δ_i. What else a method sends (``cohort.messages``, scalars, buffers) passes no channel.

A part that compresses, clips or masks what a client sends overrides :meth:`ChannelPart.send`; one that decodes a sum or
adds noise to it overrides :meth:`ChannelPart.receive`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.server import ServerCallback, Sums
from fedbc_lightning.state import BufferPolicy, Cohort, ParameterLayout, ServerState, StateDeclaration


class Exchange(NamedTuple):
    """What the messages of a run consist of, for the checks of channel parts before round 1.

    Attributes:
        algorithm: The method.
        server_parts: The server's parts, to which the clients' messages go.
        declaration: The state that the method and its parts keep.
        layout: The model's parameters and buffers.
        buffers: Policy for buffers.
        scales_gradients: Whether the clients of a round decide about the next one's scale of gradients.
    """

    algorithm: FederatedAlgorithm
    server_parts: Sequence[ServerCallback]
    declaration: StateDeclaration
    layout: ParameterLayout
    buffers: BufferPolicy
    scales_gradients: bool


class ChannelPart:
    """Base class of what happens to a message between a client and the server; a part keeps declared state only.

    Attributes:
        hides_participants: Whether nobody may see who took part in a round: then one without clients goes on as any
            other.
    """

    hides_participants: bool = False

    def server_parts(self, parts: Sequence[ServerCallback], algorithm: FederatedAlgorithm) -> list[ServerCallback]:
        """Return the server's parts, in which this part may replace the one that forms z."""
        return list(parts)

    def check(self, exchange: Exchange) -> None:
        """Raise a ConfigurationError if the messages of the run cannot pass this part."""

    def declare(self, state: StateDeclaration) -> None:
        """Declare the state that this part keeps between rounds."""

    def broadcast(self, z: Tensor, server: ServerState) -> Tensor:
        """Return the z (d,) that clients receive."""
        return z

    def send(self, updates: Tensor, cohort: Cohort, server: ServerState) -> Tensor:
        """Return what the server reads of the clients' updates (K, d); this is the clients' half of the part.

        Args:
            updates: The updates w_i − z' of all clients of the cohort, which must not be changed in place. Those of
                clients that are not ``cohort.valid`` count nowhere.
            cohort: The clients, whose state may be staged.
            server: State of the server.
        """
        return updates

    def receive(self, server: ServerState, sums: Sums) -> None:
        """Change the round's sums over all clients before z is formed of them; this is the server's half of the part.

        The clients' records of the round are ``server.records``.
        """

    def bytes(self, down: int, up: int, size: int, number_bytes: int) -> tuple[int, int]:
        """Return the bytes of z on its way to a client, and those of a client's update.

        Args:
            down: Bytes of z without this part.
            up: Bytes of an update without this part.
            size: Number d of elements of a vector.
            number_bytes: Bytes of one number in the precision of z.
        """
        return down, up

    def describe(self) -> dict[str, str]:
        """Return what must stay the same for a run to be resumed, by the name of its setting."""
        return {}


class Channel:
    """Passes the messages of a run through the parts of its channel.

    Args:
        parts: The parts, in the order in which a message on its way to the server passes them.

    Attributes:
        hides_participants: Whether a round without clients goes on as any other.
    """

    def __init__(self, parts: Sequence[ChannelPart] = ()) -> None:
        self.parts = list(parts)
        self.hides_participants = any(part.hides_participants for part in parts)
        # Written as z + (w − z'), a model is rounded: without a part that changes it, it stays as it was trained.
        self._changes_models = any(
            type(part).send is not ChannelPart.send or type(part).broadcast is not ChannelPart.broadcast
            for part in self.parts
        )

    def server_parts(self, parts: Sequence[ServerCallback], algorithm: FederatedAlgorithm) -> list[ServerCallback]:
        """Return the server's parts with those that the channel puts in their place."""
        for part in self.parts:
            parts = part.server_parts(parts, algorithm)
        return list(parts)

    def open(self, exchange: Exchange) -> None:
        """Check that the messages of a run can pass, and declare what the parts keep.

        Raises:
            ConfigurationError: They cannot; the message names the setting and says why.
        """
        for part in self.parts:
            part.check(exchange)
            part.declare(exchange.declaration)

    def broadcast(self, server: ServerState) -> Tensor:
        """Return the z' (d,) that the clients of the server's round receive."""
        z = server.z
        for part in self.parts:
            z = part.broadcast(z, server)
        return z

    @contextmanager
    def received(self, server: ServerState, z: Tensor) -> Iterator[None]:
        """Show the clients' half in this context what clients know of the server: the z (d,) that they received.

        Nobody who takes part is shown where that is hidden.
        """
        kept = server.z, server.sampled, server.ids
        server.values["z"], server.is_at_clients = z, True
        if self.hides_participants:
            server.sampled, server.ids = [], []
        try:
            yield
        finally:
            server.values["z"], server.sampled, server.ids = kept
            server.is_at_clients = False

    def send(self, cohort: Cohort, server: ServerState) -> None:
        """Replace the models w_i of a cohort that has trained by what travels: Δ_i if a part changes it, else w_i.

        Args:
            cohort: The clients; its ``w`` becomes a new tensor, so that rows that were staged from it stay.
            server: State of the server as the clients know it, with the z' from which they have trained.
        """
        if not self._changes_models:
            return
        updates = cohort.w - server.z
        for part in self.parts:
            updates = part.send(updates, cohort, server)
        cohort.w = updates

    def read(self, cohort: Cohort, server: ServerState) -> None:
        """Replace what has travelled by the models w_i as the server reads them, z + Δ_i."""
        if self._changes_models:
            cohort.w = server.z + cohort.w
            cohort.require_finite(cohort.w)

    def receive(self, server: ServerState, sums: Sums) -> None:
        """Let the server's halves change the sums of a round, the last part first."""
        # The last part that a message passed on its way is the first to undo what it did, as in a stack of protocols.
        for part in reversed(self.parts):
            part.receive(server, sums)

    def bytes(self, size: int, number_bytes: int) -> tuple[int, int]:
        """Return the bytes of z on its way to a client, and those of a client's update."""
        down = up = size * number_bytes
        for part in self.parts:
            down, up = part.bytes(down, up, size, number_bytes)
        return down, up

    def describe(self) -> dict[str, str]:
        """Return what must stay the same for a run to be resumed, by the name of its setting."""
        return {name: value for part in self.parts for name, value in part.describe().items()}
