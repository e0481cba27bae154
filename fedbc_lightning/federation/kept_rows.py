"""Clients' vectors that stay with clients elsewhere: they never travel, and none is lost with an answer."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.federation.channel import ChannelPart, Exchange
from fedbc_lightning.federation.messages import Down, MessageError, Rows, Up, decode, encode
from fedbc_lightning.state import ClientStore, StateDeclaration

# Name of the client scalar at the server: the last round whose message has become part of z; -1: none
TAKEN = "last_taken_round"


class RowsAtClients(ChannelPart):
    """Refuses methods whose server needs the clients' vectors, and notes whose messages have become part of z."""

    def check(self, exchange: Exchange) -> None:
        """Refuse a method that cannot leave its clients' vectors with the clients.

        Raises:
            ConfigurationError: The method is such a one; the message says why.
        """
        algorithm = exchange.algorithm
        if algorithm.trains_pooled or any(part.needs_rows for part in exchange.server_parts):
            raise ConfigurationError(
                f"algorithm: the server of {algorithm} reads or writes vectors or data of clients, and under this "
                "trainer.backend they stay with the clients; take FedBC, SCAFFOLD, Ditto, ..., or keeps_rows: false."
            )

    def declare(self, state: StateDeclaration) -> None:
        """Declare the last round whose message has become part of z, for each client, if clients keep vectors."""
        self._described = {"trainer.backend": "clients keep their vectors"} if state.client_vectors else {}
        if state.client_vectors:
            state.client_scalar(TAKEN, -1.0)

    def describe(self) -> dict[str, str]:
        """Return who keeps the clients' vectors, if there are any: that cannot change between two parts of a run."""
        return self._described


def rows_before(places: MutableMapping[str, bytes], store: ClientStore, form: str, down: Down) -> Down:
    """Return a message with the vectors from which its clients go on; it has them if they travel.

    A client keeps two versions of its vectors: those with its last answer, and those before. It goes on from the ones
    that belong to the last round whose message has become part of z, so that a lost answer, a late one, a round that
    was broken off or a server that resumed leave no trace.

    Args:
        places: What the clients keep, by their numbers.
        store: The store of the worker.
        form: As in :class:`~fedbc_lightning.federation.messages.RoundStart`, before the first round.
        down: The message of the server.

    Raises:
        MessageError: A client does not keep what the server goes on from.
    """
    if not down.taken:
        return down
    start = {name: store.start(name) for name in store.vector_names}
    # Since rows were kept, training may have been found to write more: it stands at the end, as before round 1.
    more = {name: row for name, row in start.items() if store.row_shape(name) is not None}
    found: list[dict[str, Tensor]] = []
    for k, (client, taken) in enumerate(zip(down.clients, down.taken, strict=True)):
        kept = decode(places[str(client)], Rows) if str(client) in places else Rows(form, {})
        sent = start | {name: rows[k] for name, rows in down.rows.items()}
        versions = (kept.versions if kept.form == form else {}) | {-1: sent}
        if taken not in versions:
            raise MessageError(
                f"client {client} goes on from the vectors that it kept in round {taken}, and those that are kept here "
                f"are of rounds {[*versions]} (-1: none); where vectors stay with the clients, none can go on without "
                "its own"
            )
        own = {name: torch.cat([row, more.get(name, row)[len(row) :]]) for name, row in versions[taken].items()}
        found.append(own if taken < 0 else {name: store.as_kept(name, row) for name, row in own.items()})
    return replace(down, rows={name: [own[name] for own in found] for name in start})


def keep_rows(places: MutableMapping[str, bytes], store: ClientStore, form: str, round: int, down: Down, up: Up) -> Up:
    """Keep the vectors of clients that have trained, beside those from which they went on.

    Args:
        places: What the clients keep, by their numbers.
        store: The store of the worker, which says how rows are rounded.
        form: As for :func:`rows_before`.
        round: The round in which they have trained.
        down: The message with the vectors before.
        up: The message of the clients, with the vectors that they have staged.

    Returns:
        The message without vectors.
    """
    for k, client in enumerate(down.clients):
        before = {name: rows[k] for name, rows in down.rows.items()}
        after = before | {name: store.as_kept(name, rows[k]) for name, rows in up.rows.items() if up.valid[k]}
        places[str(client)] = encode(Rows(form, {down.taken[k]: before, round: after}))
    return replace(up, rows={})
