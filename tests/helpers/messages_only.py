"""Backends whose workers share nothing with the server but messages, all in this process."""

import copy
from collections.abc import Callable, Iterator, Sequence

from fedbc_lightning.distributed.backend import Ask, Backend, Lost, Worker
from fedbc_lightning.federation.messages import MessageError


class RowsStay(Backend):
    """Has each client trained by a worker of its own, which keeps the client's vectors.

    Args:
        places: What the clients keep, by their numbers; it outlives the server and the workers.
    """

    keeps_rows = True

    def __init__(self, places: dict[str, bytes] | None = None) -> None:
        self.places = {} if places is None else places

    def open(self, make_worker: Callable[[], Worker]) -> None:
        self._make, self._workers = copy.deepcopy(make_worker), getattr(self, "_workers", dict[int, Worker]())

    def work(self, start: bytes, asks: Sequence[Ask]) -> Iterator[tuple[int, bytes | Lost]]:
        for index, ask in enumerate(asks):
            (client,) = ask.clients
            if client not in self._workers:
                worker = self._workers[client] = copy.deepcopy(self._make)()
                worker.rows = self.places
            try:
                yield index, self._workers[client].answer(start, ask.down)
            except MessageError as error:
                yield index, Lost(str(error))


class MessagesOnly(Backend):
    """Has clients trained by workers that take turns, and brings the answers in the opposite order.

    Args:
        num_workers: Number of workers.
        outlive_runs: Whether they serve one run of a config after another.
    """

    def __init__(self, num_workers: int = 2, outlive_runs: bool = False) -> None:
        self._num_workers, self._outlive_runs, self._workers = num_workers, outlive_runs, list[Worker]()

    def open(self, make_worker: Callable[[], Worker]) -> None:
        self._make, self._workers = copy.deepcopy(make_worker), self._workers if self._outlive_runs else []

    def work(self, start: bytes, asks: Sequence[Ask]) -> Iterator[tuple[int, bytes | Lost]]:
        if not self._workers:
            self._workers = [copy.deepcopy(self._make)() for _ in range(self._num_workers)]
        for index in reversed(range(len(asks))):
            yield index, self._workers[index % self._num_workers].answer(start, asks[index].down)
