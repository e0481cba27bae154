"""How process 0 accepts the lifelines of the other processes, and rejects any other connection to its port."""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress

from fedbc_lightning.core.errors import ConfigurationError

SECONDS_TO_CONNECT = 60.0
"""Seconds within which all processes must connect to process 0."""

SECONDS_PER_STRANGER = 2.0
"""Seconds that a new connection has to send the token; connections are handled in parallel."""

LONGEST_GREETING = 256
"""Largest number of bytes in a greeting."""

BACKLOG = 128
SECONDS_OF_A_LOOK = 0.01
"""Seconds that one wait for a new connection lasts, before the processes that have come are counted again."""


def serve(host: str, num_nodes: int) -> socket.socket:
    """Listen on a free port of the network interface that has the address ``host``.

    All interfaces are used if no interface of this machine has the address, as behind network address translation, or
    if it is a loopback address although there are other machines: hosts files often map a machine's own name to one.

    Args:
        host: Name or address of process 0's machine, ``MASTER_ADDR``.
        num_nodes: Number of machines.
    """
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            is_loopback = ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
            if not (is_loopback and num_nodes > 1):
                with suppress(OSError):
                    return socket.create_server(place[:2], family=family, backlog=BACKLOG)
    return socket.create_server(("", 0), backlog=BACKLOG)


def greet(peer: socket.socket, token: str, rank: int) -> None:
    """Send process 0 the token and the rank of the process that connects."""
    peer.sendall(json.dumps([token, rank]).encode() + b"\n")


def take(server: socket.socket, token: str, ranks: Collection[int]) -> dict[int, socket.socket]:
    """Wait until every rank in ``ranks`` has connected and sent the token, and return the connection of each.

    Raises:
        ConfigurationError: A rank did not connect within :data:`SECONDS_TO_CONNECT`.
    """
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + SECONDS_TO_CONNECT

    def hear(peer: socket.socket) -> None:
        with suppress(OSError):
            peer.settimeout(SECONDS_PER_STRANGER)
            rank = _rank_of(_line(peer), token)
            if rank is not None and rank in ranks and rank not in found:
                peer.settimeout(None)
                found[rank] = peer
                return
        peer.close()

    server.settimeout(SECONDS_OF_A_LOOK)
    while len(found) < len(ranks) and time.monotonic() < deadline:
        with suppress(OSError):
            threading.Thread(target=hear, args=(server.accept()[0],), daemon=True).start()
    missing = sorted(set(ranks) - set(found))
    if missing:
        raise ConfigurationError(
            f"trainer.devices: process {', '.join(map(str, missing))} (counted from 0) did not come to port "
            f"{server.getsockname()[1]} of process 0 in {SECONDS_TO_CONNECT:g} s; is it open between the machines?"
        )
    return found


def _line(peer: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"\n") and len(said) < LONGEST_GREETING:
        part = peer.recv(LONGEST_GREETING)
        if not part:
            break
        said += part
    return said


def _rank_of(said: bytes, token: str) -> int | None:
    """Return the rank in a greeting, or None if the greeting is not from a process of this run."""
    with suppress(ValueError, RecursionError):
        content = json.loads(said)
        if isinstance(content, list) and len(content) == 2 and type(content[1]) is int:
            return content[1] if secrets.compare_digest(str(content[0]).encode(), token.encode()) else None
    return None
