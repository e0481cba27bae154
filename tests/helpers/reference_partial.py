"""NumPy loops on quadratics in which a part of each client's model stays with it; no code of the package.

Shapes: w, z (d,) with the kept coordinates masked out of everything that is sent; kept (N, d), of which a mask counts.
"""

from __future__ import annotations

import numpy as np

from helpers.reference import Clients, Local, _Log, train


def partial_sharing(
    clients: Clients,
    rounds: list[list[int]],
    start: np.ndarray,
    local: Local,
    is_kept: np.ndarray,
    dual_lr: float = 0.0,
    dual_init: float = 0.0,
    tolerance: float = 0.0,
    weighting: str = "samples",
) -> dict[str, np.ndarray]:
    """FedAvg, and with ``weighting="dual"`` FedBC, over the shared coordinates alone.

    Returns:
        z (T, d), in which kept coordinates are the initial ones, ``kept`` (T, N, d) with zeros where shared, ``dual``.
    """
    number, shared = len(clients), ~is_kept
    z, kept, dual, log = start.copy(), np.tile(start, (number, 1)), np.full(number, dual_init), _Log()
    for t, sampled in enumerate(rounds, start=1):
        found = {}
        for i in sampled:
            whole = np.where(is_kept, kept[i], z)
            lam = dual[i] if weighting == "dual" else 0.0
            found[i] = train(
                clients, local, t, i, whole, lambda w, z=z, lam=lam: 2 * lam * np.where(shared, w - z, 0)
            ).w
            kept[i] = found[i]
            if weighting == "dual":
                distance = float(np.sum((found[i] - z)[shared] ** 2))
                dual[i] = max(dual[i] + dual_lr * (distance - tolerance), 0.0)
        weights = dual[sampled] if weighting == "dual" else np.array([len(clients[i][1]) for i in sampled], float)
        mean = sum(weight * found[i] for weight, i in zip(weights, sampled, strict=True)) / weights.sum()
        z = np.where(shared, mean, z)
        log.add(z=z, kept=np.where(is_kept, kept, 0.0), dual=dual)
    return log.arrays()
