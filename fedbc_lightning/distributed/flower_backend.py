"""Flower: SuperNodes, each of which is one client, train the clients of a run; Flower carries the messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Annotated, Any

from fedbc_lightning.core.checks import above, at_least, check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.distributed.backend import Ask, Backend, Lost, Worker
from fedbc_lightning.distributed.flower_messages import content_of, parts_of
from fedbc_lightning.distributed.heartbeat import LostProcessError
from fedbc_lightning.distributed.interrupts import check

log = logging.getLogger(__name__)

MOST_LOSSES = 3
"""Number of rounds in a row without any answer that end the run; that is no single client's fault."""
SECONDS_OF_WAIT = 0.1
"""Seconds between two looks for answers."""


class Flower(Backend):
    """Has each client trained by a SuperNode of Flower, which alone has the client's data.

    A run with it is started by ``flwr run``, in the folder that ``fedbc-cli deploy flower`` writes. A client whose
    SuperNode is lost, or cannot train it, has dropped out of the round.

    Args:
        timeout: Seconds after which a client that has not answered counts as lost; None: when Flower says that its
            SuperNode is lost, which takes a minute.
        wait: Seconds that the first round waits for the SuperNodes of its clients.
        keeps_rows: Whether the clients' vectors, such as x_i of FedBC, stay at their SuperNodes; else they lie at the
            server and travel with the messages.
        keep_messages: Whether all messages are kept in the run folder, for ``fedbc-cli verify``.
    """

    def __init__(
        self, timeout: Annotated[float, above(0)] | None = None, wait: Annotated[float, at_least(0)] = 120.0,
        keeps_rows: bool = True, keep_messages: bool = False,
    ) -> None:  # fmt: skip
        check_arguments(Flower, locals(), "trainer.backend: Flower")
        self.timeout, self.wait, self.keeps_rows, self.keep_messages = timeout, wait, keeps_rows, keep_messages

    def connect(self, grid: Any, names: Callable[[], Sequence[str] | None]) -> None:
        """Take over what Flower gives to the server's app.

        Args:
            grid: Flower's ``Grid``, which carries messages.
            names: Tells the names of the clients, if they have any.
        """
        self._grid, self._names = grid, names

    def open(self, make_worker: Callable[[], Worker]) -> None:
        """Prepare for a run; its workers are made by the apps of the SuperNodes."""
        if not hasattr(self, "_grid"):
            raise ConfigurationError(
                "trainer.backend: Flower: this run is started by `flwr run`, in the folder that `fedbc-cli deploy "
                "flower --config ... --folder ...` writes; leave the backend out to train here."
            )
        self._nodes = dict[int, int]()  # client -> id of its SuperNode
        self._queries: dict[str, int] | None = None  # id of a message that asks a SuperNode which client it is -> node
        self._asked, self._num_lost = set[int](), 0

    def work(self, start: bytes, asks: Sequence[Ask]) -> Iterator[tuple[int, bytes | Lost]]:
        """Have the messages answered by the SuperNodes of their clients."""
        self._find_nodes({client for ask in asks for client in ask.clients})
        waiting, answers, reason = dict[str, int](), 0, "there was nobody to ask"
        come = list[tuple[int, bytes | Lost]]()
        for index, ask in enumerate(asks):
            (client,) = ask.clients
            message = self._push(self._nodes.get(client), "train", {"start": start, "down": ask.down})
            if message is None:
                come.append((index, Lost("none of the SuperNodes that are connected is this client")))
            else:
                waiting[message] = index
        end = None if self.timeout is None else time.monotonic() + self.timeout
        while waiting or come:
            for index, answer in come:
                reason, answers = (answer.reason, answers) if isinstance(answer, Lost) else (reason, answers + 1)
                yield index, answer
            come = [(waiting.pop(name), answer) for name, answer in self._pull(waiting)]
            if end is not None and time.monotonic() > end:  # what comes later is never pulled
                come += [(index, Lost(f"there was no answer in {self.timeout:g} s")) for index in waiting.values()]
                waiting.clear()
        self._num_lost = 0 if answers else self._num_lost + 1
        if self._num_lost >= MOST_LOSSES:
            raise LostProcessError(
                f"trainer.backend: Flower: no client has answered for {MOST_LOSSES} rounds; the last one: {reason}"
            )

    def _push(self, node: int | None, kind: str, parts: dict[str, bytes]) -> str | None:
        """Send a message to a SuperNode; return its id, or None if there is no such node any more."""
        from flwr.app import Message

        if node is None:
            return None
        (name,) = [*self._grid.push_messages([Message(content_of(parts), node, kind)])] or [None]
        return name

    def _pull(self, names: Sequence[str] | dict[str, Any]) -> Iterator[tuple[str, bytes | Lost]]:
        """Yield the answers that have come to messages, with the messages' ids; if there are none, wait a little."""
        check()
        found = [*self._grid.pull_messages([*names])] if names else []
        for reply in found:
            name = reply.metadata.reply_to_message_id
            if name in names:
                yield name, _answer_in(reply)
        if names and not found:
            Event().wait(SECONDS_OF_WAIT)

    def _find_nodes(self, clients: set[int]) -> None:
        """Ask new SuperNodes which client they are; the first round waits for those of its clients."""
        end = time.monotonic() + (self.wait if self._queries is None else 0)
        queries = self._queries = self._queries or {}
        while True:
            for node in {*self._grid.get_node_ids()} - self._asked:
                self._asked.add(node)
                name = self._push(node, "query", {})
                if name is not None:
                    queries[name] = node
            for name, answer in self._pull(queries):
                self._take_node(queries.pop(name), answer)
            if clients <= self._nodes.keys() or time.monotonic() > end:
                return
            if not queries:
                Event().wait(SECONDS_OF_WAIT)

    def _take_node(self, node: int, answer: bytes | Lost) -> None:
        """Note which client a SuperNode is."""
        names = [*(self._names() or ())]
        said = answer.reason if isinstance(answer, Lost) else answer.decode(errors="replace")
        if isinstance(answer, Lost) or not (said in names or said.isdecimal()):
            known = f"one of {', '.join(names)}, or " if names else ""
            log.warning(
                f"SuperNode {node} is no client of this run: {said!r}. Start it with --node-config 'client=...', "
                f"{known}the client's number."
            )
            return
        client = names.index(said) if said in names else int(said)
        if client in self._nodes:
            log.warning(f"SuperNode {node} is client {said}, as {self._nodes[client]} was, whose place it takes.")
        self._nodes[client] = node


def _answer_in(reply: Any) -> bytes | Lost:
    """Return what a SuperNode has answered, or why it has not, in one line."""
    if reply.has_error():
        return Lost(" ".join(str(reply.error.reason or f"error {reply.error.code} of Flower").split()).rstrip("."))
    try:
        parts = parts_of(reply.content)
        return parts["up"] if "up" in parts else Lost(parts["error"].decode(errors="replace"))
    except Exception:  # whatever a stranger sends
        return Lost("it has sent a message of another program")
