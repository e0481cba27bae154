"""NumPy loops of algorithms that are assembled from parts, and of training on pooled data."""

from __future__ import annotations

import numpy as np

from helpers.reference import Clients, Local, _Log, train
from helpers.reference_global import geometric_median


def mixed(clients: Clients, rounds: list[list[int]], z: np.ndarray, local: Local) -> dict[str, np.ndarray]:
    """FedProx term (0.2) + FedBC's dual ascent (0.05, tolerance 0.5) + geometric median (4 sweeps) + server Adam."""
    number = len(clients)
    dual, gamma, log = np.zeros(number), np.full(number, 0.5), _Log()
    first, second = np.zeros_like(z), np.full_like(z, 1e-3**2)
    for t, sampled in enumerate(rounds, start=1):
        x = {i: train(clients, local, t, i, z, lambda w, z=z: 0.2 * (w - z)).w for i in sampled}
        for i in sampled:
            dual[i] = max(0.0, dual[i] + 0.05 * (np.sum((x[i] - z) ** 2) - gamma[i]))
        updates = np.stack([x[i] - z for i in sampled])
        direction = geometric_median(max_iter=4, rtol=1e-12)(updates, dual[sampled])
        first = 0.9 * first + 0.1 * direction
        second = 0.99 * second + 0.01 * direction**2
        z = z + 0.1 * first / (np.sqrt(second) + 1e-3)
        log.add(z=z, dual=dual, tolerance=gamma, server_momentum=first, server_second_moment=second)
    return log.arrays()


def centralized(clients: Clients, rounds: list[list[int]], z: np.ndarray, local: Local) -> dict[str, np.ndarray]:
    """E epochs over all clients' samples, as of one client with the number -1."""
    pooled = [tuple(np.concatenate(parts) for parts in zip(*clients, strict=True))]
    log = _Log()
    for t in range(1, len(rounds) + 1):
        z = train(pooled, local, t, -1, z, np.zeros_like).w
        log.add(z=z)
    return log.arrays()
