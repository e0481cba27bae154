"""A backend: who trains the clients of a run, if this is not the process of the run itself."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Protocol

from fedbc_lightning.core.checks import Checked, Count, check_types, shown
from fedbc_lightning.core.errors import ConfigurationError

log = logging.getLogger(__name__)


class Worker(Protocol):
    """Does what messages ask of clients; a :class:`~fedbc_lightning.trainer.client_round.ClientRound` is one."""

    def answer(self, start: bytes, down: bytes) -> bytes:
        """Do what a message asks the clients for, and return what they send."""


class Ask(NamedTuple):
    """A message to clients that train or are evaluated together.

    Attributes:
        clients: Their numbers.
        num_steps: Number of steps that all of them together are asked to take, or of samples in an evaluation.
        down: The message.
    """

    clients: list[int]
    num_steps: int
    down: bytes


class Lost(NamedTuple):
    """Stands in the place of an answer that never came.

    Attributes:
        reason: Why, for the log.
    """

    reason: str


# Place of a message among those that were asked, and its answer
Numbered = tuple[int, bytes | Lost]


class Backend(Checked, ABC):
    """Base class of backends, which carry messages to workers and bring their answers back.

    Messages are bytes (see :mod:`fedbc_lightning.federation.messages`), and what a client answers is a function of
    them, so that any worker may train any client, and a message may be given to another worker if one is lost.

    Attributes:
        clients_per_message: Largest number of clients in a message; None: one, and with the vectorized engine an even
            share of the clients that it trains together, for each worker.
        keeps_rows: Whether clients' vectors stay in ``ClientRound.rows`` of a client's own worker; else they lie at the
            server and travel with the messages.
        keep_messages: Whether all messages of a run's training are kept in its folder, so that ``fedbc-cli verify`` can
            work out a client's round again.
    """

    section = "trainer.backend"
    clients_per_message: int | None = 1
    keeps_rows: bool = False
    keep_messages: bool = False

    @abstractmethod
    def open(self, make_worker: Callable[[], Worker]) -> None:
        """Prepare for a run.

        Args:
            make_worker: Makes a worker, from the user's module, data and method as they were given.
        """

    def num_workers(self, num_clients: int) -> int:
        """Return the number of workers that train ``num_clients`` clients of a round."""
        return 1

    @abstractmethod
    def work(self, start: bytes, asks: Sequence[Ask]) -> Iterator[Numbered]:
        """Have all messages of a round or an evaluation answered, and yield the index of each with its answer.

        Answers may come in any order.

        Args:
            start: The message that all of these clients are sent; empty where those of a ``SitesDataModule`` are asked
                once what data they have.
            asks: The messages.
        """

    def close(self) -> None:
        """Let the workers go; the run is over."""

    def check(self) -> None:
        """Raise a ConfigurationError if what the class says of itself is of another type."""
        kinds = {"clients_per_message": Count | None, "keeps_rows": bool, "keep_messages": bool}
        check_types(kinds, {name: getattr(self, name) for name in kinds}, self.section)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings alone, since workers cannot be copied."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def in_order(answers: Iterable[Numbered], asks: Sequence[Ask], where: str) -> Iterator[bytes | Lost]:
    """Yield the first answer to each message in the order of the messages, however they come.

    A message without one is lost; one line says of any other answer that it is not used.

    Args:
        answers: The answers of a backend, each with the index of its message.
        asks: The messages.
        where: Where in the run that is, for the log.

    Raises:
        ConfigurationError: The backend has brought something else.

    Example:
        >>> asks = [Ask([client], 1, b"") for client in range(4)]
        >>> [*in_order([(3, b"d"), (0, b"a"), (2, b"c")], asks, "round 1")]
        [b'a', Lost(reason='trainer.backend brought no answer'), b'c', b'd']
    """
    waiting, index, seen = dict[int, bytes | Lost](), 0, set[int]()
    for each in answers if isinstance(answers, Iterable) else [answers]:
        is_pair = isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], Integral)
        if not (is_pair and isinstance(each[1], (bytes, Lost))):
            raise ConfigurationError(
                "trainer.backend: work must yield the index of a message with its answer, bytes or Lost('why'), e.g. "
                f"(0, answer); got {shown(each)}."
            )
        come, answer = each
        if come in seen or come not in range(len(asks)):
            what = f"a second answer of clients {asks[come].clients}" if come in seen else f"an answer {come!r}"
            log.warning(f"{where}: trainer.backend brought {what}, which nobody asked: it is not used.")
            continue
        seen.add(come)
        waiting[come] = answer
        while index in waiting:
            yield waiting.pop(index)
            index += 1
    for left in range(index, len(asks)):
        yield waiting.get(left, Lost("trainer.backend brought no answer"))
