"""NumPy loop for FedNova on quadratics, from the paper's equations alone; no code of the package."""

from __future__ import annotations

import numpy as np

from helpers.reference import Clients, Local, _Log, _shares, train


def fednova(
    clients: Clients, rounds: list[list[int]], z: np.ndarray, local: Local, weighting: str = "samples"
) -> dict[str, np.ndarray]:
    """z - tau * sum of p_i d_i, where d_i is the update over the sum of its gradients' coefficients."""
    x, log = np.tile(z, (len(clients), 1)), _Log()
    for t, sampled in enumerate(rounds, start=1):
        shares, directions, norms = _shares(clients, sampled, weighting), [], []
        for i in sampled:
            out = train(clients, local, t, i, z, np.zeros_like)
            x[i], velocity, norm = out.w, 0.0, 0.0
            for _ in range(out.num_steps):  # the optimizer on gradients that are all 1
                velocity = local.momentum * velocity + 1.0
                norm += velocity
            directions.append((z - out.w) / norm)
            norms.append(norm)
        z = z - float(shares @ np.array(norms)) * (shares @ np.stack(directions))
        log.add(z=z, local_model=x)
    return log.arrays()
