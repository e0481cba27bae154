"""RFA (Pillutla et al. 2022)."""

from __future__ import annotations

from typing import Literal

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.server import GeometricMedian


class RFA(FedAvg):
    """RFA: FedAvg whose server takes the geometric median of the clients' models in place of their mean.

    Problem:
        min_v Σ p_i ‖v − w_i‖ at the server: less than half of the weight may send anything without moving z far.

    Update::

        client    w_i ← E epochs of the user's optimizer from z
        server    v ← Σ p_i w_i;  repeat  b_i = p_i / max(ν, ‖v − w_i‖),  v ← Σ b_i w_i / Σ b_i;  z ← v

    State:
        None.
    Communication:
        z down; w_i and n_i up.
    Partial work:
        Dropped, as in FedAvg.
    Local model:
        The last w_i.
    Degenerate cases:
        One client, or equal w_i: FedAvg. It is FedAvg with ``robust_rule: GeometricMedian``.
    Departures:
        Runs to a relative change of 1e-6 or ``max_iter``; the public code stops after 4 sweeps, far from converged.

    References:
        Pillutla et al. 2022, "Robust Aggregation for Federated Learning", Algorithm 2 (smoothed Weiszfeld).

    Args:
        weighting: ``"samples"``: p_i = n_i / Σ n_j. ``"uniform"``: p_i = 1 / S.
        smoothing: ν, below which a distance counts as ν.
        max_iter: Most sweeps.

    Raises:
        ConfigurationError: A value outside its range.
    """

    def __init__(
        self, weighting: Literal["samples", "uniform"] = "samples", smoothing: float = 1e-5, max_iter: int = 100
    ) -> None:
        super().__init__(weighting, GeometricMedian(smoothing, max_iter))

    def __str__(self) -> str:
        """Without its rule, which is the method."""
        return "RFA"
