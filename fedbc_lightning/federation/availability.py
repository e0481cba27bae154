"""When clients are there: intervals of simulated time that repeat after a period."""

from __future__ import annotations

import numpy as np


class Availability:
    """Tells who is there at a time, and when somebody comes next.

    Times are compared as k · period + start, never by a remainder, and the start belongs to an interval however short
    it is beside the time, so that a client is there at the very time that :meth:`next_start` has named.

    Args:
        clients: Client of each interval.
        starts: Start of each interval, in seconds, in [0, period).
        ends: End of each interval, at most one period after its start.
        period: Seconds after which all intervals repeat.
        num_clients: Number of clients N.

    Attributes:
        period: Seconds after which all intervals repeat.
    """

    def __init__(
        self, clients: np.ndarray, starts: np.ndarray, ends: np.ndarray, period: float, num_clients: int
    ) -> None:
        self._clients, self._starts, self._ends = clients, starts, ends
        self.period, self._num_clients = period, num_clients

    def at(self, time: float) -> np.ndarray:
        """Return who is there at a time, (N,) bool."""
        here = np.zeros(self._num_clients, dtype=bool)
        for k in self._periods(time):
            starts, ends = k * self.period + self._starts, k * self.period + self._ends
            is_in = (starts == time) | ((starts < time) & (time < ends))
            here[self._clients[is_in]] = True
        return here

    def next_start(self, time: float, clients: np.ndarray) -> float:
        """Return when the first of some clients comes after a time; infinity if they have no interval."""
        starts = self._starts[np.isin(self._clients, clients)]
        later = [
            float(s.min()) for k in self._periods(time) if len(s := (after := k * self.period + starts)[after > time])
        ]
        return min(later, default=np.inf)

    def _periods(self, time: float) -> range:
        """Numbers of the periods whose intervals may hold the time or come next, with one to spare for rounding."""
        k = int(time // self.period)
        return range(k - 1, k + 3)
