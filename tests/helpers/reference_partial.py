"""NumPy loops on quadratics in which a part of each client's model stays with it; no code of the package.

Shapes: w, z (d,) with the kept coordinates masked out of everything that is sent; kept (N, d), of which a mask counts.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from helpers.reference import Logged, Run, outer_loop


@outer_loop
def partial_sharing(
    run: Run,
    start: np.ndarray,
    is_kept: np.ndarray,
    dual_lr: float = 0.0,
    dual_init: float = 0.0,
    tolerance: float = 0.0,
    weighting: str = "samples",
) -> Logged:
    """FedAvg, and with ``weighting="dual"`` FedBC, over the shared coordinates alone.

    Returns:
        z (T, d), in which kept coordinates are the initial ones, ``kept`` (T, N, d) with zeros where shared, ``dual``.
    """
    number, shared = len(run.clients), ~is_kept
    z, kept, dual = start.copy(), run.each(start), np.full(number, dual_init)
    for t, sampled in run.rounds:
        found = {}
        for i in sampled:
            whole = np.where(is_kept, kept[i], z)
            lam = dual[i] if weighting == "dual" else 0.0
            found[i] = run.train(t, i, whole, lambda w, z=z, lam=lam: 2 * lam * np.where(shared, w - z, 0)).w
            kept[i] = found[i]
            if weighting == "dual":
                distance = float(np.sum((found[i] - z)[shared] ** 2))
                dual[i] = max(dual[i] + dual_lr * (distance - tolerance), 0.0)
        weights = dual[sampled] if weighting == "dual" else np.array([len(run.clients[i][1]) for i in sampled], float)
        mean = sum(weight * found[i] for weight, i in zip(weights, sampled, strict=True)) / weights.sum()
        z = np.where(shared, mean, z)
        yield {"z": z, "kept": np.where(is_kept, kept, 0.0), "dual": dual}


def train_part(run: Run, steps: Any, round: int, client: int, start: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """SGD with momentum on the coordinates ``moves`` alone; all others stay at ``start``."""
    w, velocity = start.copy(), np.zeros_like(start)
    for batches in steps(round, client):
        grad = sum(run.gradient(client, w, rows) for rows in batches) / run.local.divisor
        velocity = run.local.momentum * velocity + grad
        w = np.where(moves, w - run.local.lr * velocity, start)
    return w


@outer_loop
def fedrep(run: Run, z: np.ndarray, head_epochs: int, is_head: np.ndarray, weighting: str = "samples") -> Logged:
    """FedRep; with ``head_epochs=0`` FedBABU, whose heads stay as they are."""
    steps: Any = run.local.steps
    own = {"number": head_epochs} if hasattr(steps, "number") else {"epochs": head_epochs, "num_steps": None}
    heads = run.each(z)
    for t, sampled in run.rounds:
        found = {}
        for i in sampled:
            w = np.where(is_head, heads[i], z)
            if head_epochs:
                w = train_part(run, replace(steps, **own), t, i, w, is_head)
            heads[i] = w
            found[i] = train_part(run, steps, t, i, w, ~is_head)
        sizes = run.sizes(sampled, weighting)
        mean = sum(size * found[i] for size, i in zip(sizes, sampled, strict=True)) / sizes.sum()
        z = np.where(is_head, z, mean)
        yield {"z": z, "local_parameters": heads[:, is_head]}
