"""NumPy loops of algorithms that are assembled from parts, and of training on pooled data."""

from __future__ import annotations

import numpy as np

from helpers.reference import Logged, Run, outer_loop, train
from helpers.reference_global import geometric_median


@outer_loop
def mixed(run: Run, z: np.ndarray) -> Logged:
    """FedProx term (0.2) + FedBC's dual ascent (0.05, tolerance 0.5) + geometric median (4 sweeps) + server Adam."""
    number = len(run.clients)
    dual, gamma = np.zeros(number), np.full(number, 0.5)
    first, second = np.zeros_like(z), np.full_like(z, 1e-3**2)
    for t, sampled in run.rounds:
        x = {i: run.train(t, i, z, lambda w, z=z: 0.2 * (w - z)).w for i in sampled}
        for i in sampled:
            dual[i] = max(0.0, dual[i] + 0.05 * (np.sum((x[i] - z) ** 2) - gamma[i]))
        updates = np.stack([x[i] - z for i in sampled])
        direction = geometric_median(max_iter=4, rtol=1e-12)(updates, dual[sampled])
        first = 0.9 * first + 0.1 * direction
        second = 0.99 * second + 0.01 * direction**2
        z = z + 0.1 * first / (np.sqrt(second) + 1e-3)
        yield {"z": z, "dual": dual, "tolerance": gamma, "server_momentum": first, "server_second_moment": second}


@outer_loop
def centralized(run: Run, z: np.ndarray) -> Logged:
    """E epochs over all clients' samples, as of one client with the number -1."""
    pooled = [tuple(np.concatenate(parts) for parts in zip(*run.clients, strict=True))]
    for t, _ in run.rounds:
        z = train(pooled, run.local, t, -1, z).w
        yield {"z": z}
