"""Flower: SuperNodes, each of which is one client, train the clients of a run; Flower carries the messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any, NamedTuple

from fedbc_lightning.core.checks import NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.distributed.backend import Ask, Backend, Lost, Numbered, Worker
from fedbc_lightning.distributed.flower_messages import content_of, parts_of
from fedbc_lightning.distributed.interrupts import raising

log = logging.getLogger(__name__)

MOST_LOSSES = 3
"""Number of lost processes after which a message is not sent again."""
CRASHED = 8
"""Flower's code for a SuperNode's process that ended, or did not start in 30 seconds, as on a busy machine."""
SECONDS_OF_WAIT = 0.1
"""Seconds between two looks for answers."""
MOST_CHARACTERS = 500
"""Most characters that are read of what a SuperNode says for people."""


class _Sent(NamedTuple):
    """A message on its way, and how many processes that were to answer it were lost.

    Attributes:
        of: What the answer belongs to: the index of a message of the server, or a SuperNode.
        node: The SuperNode that is asked; None if there is none.
        kind: What is asked for, as Flower names it.
        parts: What the message holds.
        num_losses: Number of processes.
    """

    of: int
    node: int | None
    kind: str
    parts: dict[str, bytes]
    num_losses: int = 0


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
        self,
        timeout: Positive | None = None,
        wait: NotNegative = 120.0,
        keeps_rows: bool = True,
        keep_messages: bool = False,
    ) -> None:
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
        self._queries: dict[str, _Sent] | None = None  # messages by id that ask SuperNodes which client they are
        self._known = set[int]()

    def work(self, start: bytes, asks: Sequence[Ask]) -> Iterator[Numbered]:
        """Have the messages answered by the SuperNodes of their clients."""
        self._find_nodes({client for ask in asks for client in ask.clients})
        waiting, come = dict[str, _Sent](), list[Numbered]()
        for index, ask in enumerate(asks):
            (client,) = ask.clients
            sent = _Sent(index, self._nodes.get(client), "train", {"start": start, "down": ask.down})
            if not self._push(sent, waiting):
                come.append((index, Lost("none of the SuperNodes that are connected is this client")))
        end = None if self.timeout is None else time.monotonic() + self.timeout
        while waiting or come:
            yield from come
            come = [*self._pull(waiting)]
            if end is not None and time.monotonic() > end:  # what comes later is never pulled
                come += [(sent.of, Lost(f"there was no answer in {self.timeout:g} s")) for sent in waiting.values()]
                waiting.clear()

    def _push(self, sent: _Sent, waiting: dict[str, _Sent]) -> bool:
        """Send a message, which then waits under its id; return whether there is such a SuperNode."""
        from flwr.app import Message

        if sent.node is None:
            return False
        message = Message(content_of(sent.parts), sent.node, sent.kind)
        (name,) = self._call("push_messages", [message]) or [None]
        waiting |= {} if name is None else {name: sent}
        return name is not None

    def _pull(self, waiting: dict[str, _Sent]) -> Iterator[Numbered]:
        """Yield the answers that have come, and ask again where only a process was lost; else wait a little."""
        found = self._call("pull_messages", [*waiting]) if waiting else []
        for reply in found:
            sent = waiting.pop(reply.metadata.reply_to_message_id, None)
            if sent is None:  # an answer that comes twice
                continue
            again = sent._replace(num_losses=sent.num_losses + 1)
            has_crashed = reply.has_error() and reply.error.code == CRASHED and again.num_losses < MOST_LOSSES
            if not (has_crashed and self._push(again, waiting)):
                yield sent.of, _answer_in(reply)
        if waiting and not found:
            Event().wait(SECONDS_OF_WAIT)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call Flower's grid, which tries without end to reach a SuperLink that has gone; a signal breaks that off."""
        with raising():
            return [*getattr(self._grid, method)(*arguments)]

    def _find_nodes(self, clients: set[int]) -> None:
        """Ask SuperNodes that have not told which client they are; the first round waits for those of its clients."""
        end = time.monotonic() + (self.wait if self._queries is None else 0)
        queries = self._queries = self._queries or {}
        asked = {sent.of for sent in queries.values()}
        while True:
            for node in {*self._call("get_node_ids")} - self._known - asked:
                asked.add(node)
                self._push(_Sent(node, node, "query", {}), queries)
            for node, answer in self._pull(queries):
                self._take_node(node, answer)
            if clients <= self._nodes.keys() or time.monotonic() > end:
                return
            if not queries:
                Event().wait(SECONDS_OF_WAIT)

    def _take_node(self, node: int, answer: bytes | Lost) -> None:
        """Note which client a SuperNode is."""
        if isinstance(answer, Lost):
            log.warning(f"SuperNode {node} does not tell which client it is, and is asked again: {answer.reason}.")
            return
        self._known.add(node)
        names, said = [*(self._names() or ())], answer[:MOST_CHARACTERS].decode(errors="replace")
        if not (said in names or said.isdecimal()):
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
    try:
        if reply.has_error():
            said = str(reply.error.reason or f"error {reply.error.code} of Flower")
        else:
            parts = parts_of(reply.content)
            if "up" in parts:
                return parts["up"]
            said = parts["error"].decode(errors="replace")
    except Exception:  # whatever a stranger sends
        said = "it has sent a message of another program"
    return Lost(" ".join(said[:MOST_CHARACTERS].split()).rstrip("."))
