"""How process 0 takes the lifelines of the others, and nothing from anybody else who comes to its port."""

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
SECONDS_PER_STRANGER = 2.0
"""How long somebody who has connected may take to say the token; all who have are waited for at once."""

LONGEST_GREETING = 256
BACKLOG = 128
SECONDS_OF_A_LOOK = 0.01


def serve(host: str, num_nodes: int) -> socket.socket:
    """Listen on a free port of the interface that has the address ``host``, which is ``MASTER_ADDR``.

    All interfaces are listened on where the address is not this machine's own, as behind a translated one, or where it
    is a loopback address though there are other machines: hosts files often give a machine's own name such a one.
    """
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            is_loopback = ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
            if not (is_loopback and num_nodes > 1):
                with suppress(OSError):
                    return socket.create_server(place[:2], family=family, backlog=BACKLOG)
    return socket.create_server(("", 0), backlog=BACKLOG)


def greet(peer: socket.socket, token: str, rank: int) -> None:
    """Tell process 0 who connects."""
    peer.sendall(json.dumps([token, rank]).encode() + b"\n")


def take(server: socket.socket, token: str, ranks: Collection[int]) -> dict[int, socket.socket]:
    """Wait until each of these ranks has connected and said the token; returns their connections.

    Raises:
        ConfigurationError: Not all came in a minute.
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
    """Return the rank in a greeting; None if it is none of ours."""
    with suppress(ValueError, RecursionError):
        content = json.loads(said)
        if isinstance(content, list) and len(content) == 2 and type(content[1]) is int:
            return content[1] if secrets.compare_digest(str(content[0]).encode(), token.encode()) else None
    return None
