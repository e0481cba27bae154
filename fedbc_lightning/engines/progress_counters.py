"""How far local training has come in the current round, as a screen shows it while the round goes on."""

from __future__ import annotations

from collections.abc import Iterable


class Work:
    """Counts what one process has trained; another thread may read it at any time.

    Engines add to ``num_steps`` and do nothing else in a step. Nothing that is computed depends on these numbers.

    Attributes:
        num_clients: Number of clients that this process trains in the current round.
        num_begun: Number of these clients whose training has begun.
        num_steps: Number of local steps so far, over all rounds; K clients that train at once take K steps.
    """

    def __init__(self) -> None:
        self.num_clients = self.num_begun = self.num_steps = 0
        self._begun: set[int] = set()
        self._at_work = self._steps_before = 0
        self._planned = 1

    def start_round(self, num_clients: int) -> None:
        """Begin a round in which this process trains so many clients."""
        self._begun = set()
        self.num_clients, self.num_begun, self._at_work = num_clients, 0, 0

    def begin(self, clients: Iterable[int], num_planned: int) -> None:
        """Begin a training of some clients; a method may train a client several times in a round.

        Args:
            clients: The clients that train, one or several at once.
            num_planned: Number of steps that they take together.
        """
        # Ditto trains each client twice: the second training adds no client to those that have begun.
        before = self.num_begun
        self._begun.update(clients)
        self.num_begun = len(self._begun)
        self._at_work = (self.num_begun - before) or self._at_work
        self._steps_before, self._planned = self.num_steps, max(1, num_planned)

    @property
    def fraction(self) -> float:
        """The part of the round's local training that is done, from 0 to 1; clients count alike.

        Example:
            >>> work = Work()
            >>> work.start_round(num_clients=4)
            >>> work.begin([7], num_planned=10)
            >>> work.begin([3], num_planned=10)
            >>> work.num_steps += 5
            >>> work.num_begun, work.fraction
            (2, 0.375)
        """
        done = min(1.0, (self.num_steps - self._steps_before) / self._planned)
        return (self.num_begun - self._at_work * (1 - done)) / max(1, self.num_clients)
