"""How many samples of each class every client has."""

from __future__ import annotations

import numpy as np

MAX_CELLS = 50_000_000
"""Of a table of clients and classes; integers of so many values are no classes."""


def count_labels(labels: np.ndarray, clients: np.ndarray, num_clients: int) -> np.ndarray | None:
    """Samples of each class at each client, int64 ``(N, num_classes)``.

    Args:
        labels: Class of each sample, integers ``(n,)``.
        clients: Its client, 0..N-1, ``(n,)``.
        num_clients: N.

    Returns:
        The counts; columns are the classes 0..max, or the distinct values where these are few or negative. None: there
        would be more than :data:`MAX_CELLS` of them.
    """
    values, columns = np.unique(labels, return_inverse=True)
    num_classes = len(values)
    if num_classes and values[0] >= 0 and values[-1] < 10 * num_classes:
        columns, num_classes = values[columns], int(values[-1]) + 1
    if num_clients * num_classes > MAX_CELLS:
        return None
    counts = np.bincount(clients * num_classes + columns, minlength=num_clients * num_classes)
    return counts.reshape(num_clients, num_classes)
