"""A backend whose workers share nothing with the server but messages, all in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

from fedbc_lightning.distributed.backend import Ask, Backend, Lost, Worker


class MessagesOnly(Backend):
    """Has clients trained by workers that take turns, and brings the answers in the opposite order.

    Args:
        num_workers: Number of workers.
    """

    def __init__(self, num_workers: int = 2) -> None:
        self.num_workers = num_workers

    def open(self, make_worker: Callable[[], Worker]) -> None:
        self._make, self._workers = copy.deepcopy(make_worker), list[Worker]()

    def work(self, start: bytes, asks: Sequence[Ask]) -> Iterator[tuple[int, bytes | Lost]]:
        if not self._workers:
            self._workers = [copy.deepcopy(self._make)() for _ in range(self.num_workers)]
        for index in reversed(range(len(asks))):
            yield index, self._workers[index % self.num_workers].answer(start, asks[index].down)
