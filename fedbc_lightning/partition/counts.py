"""Counts of the samples of each class at each client."""

from __future__ import annotations

import numpy as np

# Largest table of clients and classes that is counted; labels with more distinct values are hardly classes
MAX_CELLS = 50_000_000


def count_labels(labels: np.ndarray, clients: np.ndarray, num_clients: int) -> np.ndarray | None:
    """Count the samples of each class at each client.

    Args:
        labels: Class of each sample, integers ``(n,)``.
        clients: Client of each sample, 0..N-1, ``(n,)``.
        num_clients: Number of clients N.

    Returns:
        The counts, int64 ``(N, num_classes)``. Columns are the classes 0..max, or the distinct values of ``labels`` if
        some are negative or if they are few compared with the largest. None if there were more than :data:`MAX_CELLS`
        counts.
    """
    values, columns = np.unique(labels, return_inverse=True)
    num_classes = len(values)
    # A class that no client has keeps its column, but ids of users do not get a column for each number between them.
    if num_classes and values[0] >= 0 and values[-1] < 10 * num_classes:
        columns, num_classes = values[columns], int(values[-1]) + 1
    if num_clients * num_classes > MAX_CELLS:
        return None
    counts = np.bincount(clients * num_classes + columns, minlength=num_clients * num_classes)
    return counts.reshape(num_clients, num_classes)
