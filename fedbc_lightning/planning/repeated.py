"""Repeats a measurement until two of them agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
from typing import TypeVar

MARGIN = 0.15
"""Largest difference of two measurements that agree, as a fraction of the larger one."""
MAX_TRIES = 5
"""Largest number of measurements."""
MAX_SECONDS = 20.0
"""Seconds after which no further measurement is begun."""

Measured = TypeVar("Measured")


def repeated(
    measure: Callable[[], Measured],
    seconds_of: Callable[[Measured], float],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Measured, bool]:
    """Measure until two measurements agree, one after the other or not.

    Args:
        measure: Measures once.
        seconds_of: The seconds that a measurement has found.
        clock: Tells the time in seconds.

    Returns:
        The faster of the two measurements that agree, since other programs only ever slow one down; if none do, the
        fastest of all. The second value is True if two agree.

    Example:
        >>> found = iter([9.0, 5.0, 7.0, 5.2])
        >>> repeated(lambda: next(found), float)
        (5.0, True)
    """
    started, found = clock(), list[Measured]()
    while len(found) < MAX_TRIES and (not found or clock() - started < MAX_SECONDS):
        found.append(measure())
        for pair in combinations(found, 2):
            if _agree(*map(seconds_of, pair)):
                return min(pair, key=seconds_of), True
    return min(found, key=seconds_of), False


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= MARGIN * max(one, other)
