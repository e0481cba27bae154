"""NumPy loop for MOON on quadratics, from the paper's equations alone; no code of the package."""

from __future__ import annotations

import numpy as np

from helpers.reference import Logged, Rows, Run, outer_loop


def contrast_gradient(
    centres: np.ndarray, w: np.ndarray, z: np.ndarray, own: np.ndarray, temperature: float
) -> np.ndarray:
    """The gradient in w of the mean over samples of equation 3, where a model's features of a sample are w - centre."""
    total = np.zeros_like(w)
    for centre in centres:
        feature, slopes, similarities = w - centre, [], []
        for other in (z - centre, own - centre):
            norm, length = np.linalg.norm(feature), np.linalg.norm(other)
            cosine = feature @ other / (norm * length)
            similarities.append(cosine)
            slopes.append(other / (norm * length) - cosine * feature / norm**2)
        powers = np.exp(np.array(similarities) / temperature)
        share = powers[0] / powers.sum()
        total += -(1 - share) / temperature * (slopes[0] - slopes[1])
    return total / len(centres)


@outer_loop
def moon(
    run: Run,
    z: np.ndarray,
    mu: float = 1.0,
    temperature: float = 0.5,
    weighting: str = "samples",
    is_kept: np.ndarray | bool = False,
) -> Logged:
    """FedAvg with mu times the contrastive term; a client's own model is that after its last participation.

    ``is_kept`` (d,): which parameters stay with their client; those of ``z`` stay as they were at the beginning.
    """
    x = run.each(z)
    for t, sampled in run.rounds:
        ends = []
        for i in sampled:
            start = np.where(is_kept, x[i], z)

            def contrast(w: np.ndarray, rows: Rows, i: int = i, z: np.ndarray = start) -> np.ndarray:
                centres = run.clients[i][1] if rows is None else run.clients[i][1][rows]
                return mu * contrast_gradient(centres, w, z, x[i], temperature)

            ends.append(run.train(t, i, start, np.zeros_like, contrast).w)
        x[sampled] = ends
        z = np.where(is_kept, z, run.shares(sampled, weighting) @ np.stack(ends))
        yield {"z": z, "local_model": x}
