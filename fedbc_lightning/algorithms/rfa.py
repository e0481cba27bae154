"""RFA (Pillutla et al. 2022)."""

from __future__ import annotations

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.server import GeometricMedian
from fedbc_lightning.server.aggregation import Weighting


class RFA(FedAvg):
    """RFA: FedAvg whose server takes the geometric median of the clients' models in place of their mean.

    Problem:
        min_v Σ p_i ‖v − w_i‖ at the server; clients with less than half of the weight cannot move z far, whatever they
        send.

    Update::

        client    w_i ← E epochs of the user's optimizer from z
        server    v ← Σ p_i w_i;  repeat  b_i = p_i / max(ν, ‖v − w_i‖),  v ← Σ b_i w_i / Σ b_i;  z ← v

    State:
        The method keeps no state.
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is dropped, as in FedAvg.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        With one client, or equal w_i, it is FedAvg. It is always FedAvg with ``robust_rule: GeometricMedian``.
    Departures:
        The iteration stops at a relative change of 1e-6 or after ``max_iter`` sweeps; the public code stops after 4
        sweeps, far from convergence.

    References:
        Pillutla et al. 2022, "Robust Aggregation for Federated Learning", Algorithm 2 (smoothed Weiszfeld).

    Args:
        weighting: Weights of the mean: ``"samples"`` takes p_i = n_i / Σ n_j, ``"uniform"`` takes p_i = 1 / S.
        smoothing: Smallest distance ν > 0; a smaller distance counts as ν.
        max_iter: Largest number of sweeps.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, weighting: Weighting = "samples", smoothing: float = 1e-5, max_iter: int = 100) -> None:
        super().__init__(weighting, GeometricMedian(smoothing, max_iter))

    def __str__(self) -> str:
        """Return the name without the robust rule, since the rule is the method."""
        return "RFA"
