"""Strangers at the port of process 0 neither end nor delay the start."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from fedbc_lightning import ConfigurationError
from fedbc_lightning.distributed import greeting

TOKEN = "a secret"
STRANGERS = [b"[]\n", b"{}\n", b"7\n", b"\xff\xfe\n", b"[" * 400, b"null\n", b"GET / HTTP/1.1\r\n\r\n", b"",
             json.dumps([TOKEN, 7]).encode() + b"\n", json.dumps(["wrong", 1]).encode() + b"\n",
             json.dumps([TOKEN, True]).encode() + b"\n", json.dumps([TOKEN, [1]]).encode() + b"\n"]  # fmt: skip


def test_strangers_are_sent_away_and_silent_ones_delay_nobody(monkeypatch):
    monkeypatch.setattr(greeting, "SECONDS_PER_STRANGER", 1000.0)  # one after another would take that long
    with greeting.serve("localhost", 1) as server:
        place = server.getsockname()[:2]
        strangers = [socket.create_connection(place) for _ in STRANGERS + [None] * 8]  # the last eight are silent
        for stranger, said in zip(strangers, STRANGERS, strict=False):
            stranger.sendall(said)
        ours = [socket.create_connection(place) for _ in range(2)]
        threading.Timer(0.05, greeting.greet, (ours[1], TOKEN, 2)).start()
        greeting.greet(ours[0], TOKEN, 1)
        found = greeting.take(server, TOKEN, range(1, 3))
        assert {rank: peer.getpeername() for rank, peer in found.items()} == {
            rank + 1: peer.getsockname() for rank, peer in enumerate(ours)
        }
        for peer in [*strangers, *ours, *found.values()]:
            peer.close()


def test_only_the_interface_of_the_main_address_listens():
    with greeting.serve("127.0.0.1", 1) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with greeting.serve("127.0.0.1", 2) as server:  # a hosts file may say so of this machine's name
        assert server.getsockname()[0] == "0.0.0.0"


def test_a_process_that_cannot_connect_is_named(monkeypatch):
    monkeypatch.setattr(greeting, "SECONDS_TO_CONNECT", 0.05)
    with (
        greeting.serve("localhost", 1) as server,
        pytest.raises(ConfigurationError, match=r"process 1, 2 .* did not come to port"),
    ):
        greeting.take(server, TOKEN, range(1, 3))
