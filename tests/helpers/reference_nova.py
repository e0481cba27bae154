"""NumPy loop for FedNova on quadratics, from the paper's equations alone; no code of the package."""

from __future__ import annotations

import numpy as np

from helpers.reference import Logged, Run, outer_loop


@outer_loop
def fednova(run: Run, z: np.ndarray, weighting: str = "samples") -> Logged:
    """z - tau * sum of p_i d_i, where d_i is the update over the sum of its gradients' coefficients."""
    x = run.each(z)
    for t, sampled in run.rounds:
        shares, directions, norms = run.shares(sampled, weighting), [], []
        for i in sampled:
            out = run.train(t, i, z)
            x[i], velocity, norm = out.w, 0.0, 0.0
            for _ in range(out.num_steps):  # the optimizer on gradients that are all 1
                velocity = run.local.momentum * velocity + 1.0
                norm += velocity
            directions.append((z - out.w) / norm)
            norms.append(norm)
        z = z - float(shares @ np.array(norms)) * (shares @ np.stack(directions))
        yield {"z": z, "local_model": x}
