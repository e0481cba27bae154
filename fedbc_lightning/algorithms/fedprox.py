"""FedProx (Li et al. 2020)."""

from __future__ import annotations

from typing import Any

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import NotNegative
from fedbc_lightning.local import Engine, Proximal
from fedbc_lightning.state import Cohort, ServerState


class FedProx(FedAvg):
    """FedProx: FedAvg whose clients are held near z, so that partial work can be used.

    Problem:
        min_w Σ (n_i / n) f_i(w); each client minimises f_i(w) + μ/2 ‖w − z‖² as far as it gets.

    Update::

        client    each step's gradient gets  μ (w − z),  from w = z
        server    z ← Σ p_i w_i

    State:
        The method keeps no state.
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is used; the method was made for that.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        μ = 0 is FedAvg with partial work. FedBC with λ_i frozen at μ/2 is FedProx(μ) with uniform weights.
    Departures:
        The paper samples clients with probability p_k and averages uniformly; here sampling is uniform and the mean is
        weighted (``weighting``), as in FedAvg.

    References:
        Li et al. 2020, "Federated Optimization in Heterogeneous Networks", eq. 2, Algorithm 2.

    Args:
        mu: Strength μ ≥ 0 of the pull to z. The paper's grid is 0.001, 0.01, 0.1, 1.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    partial_work = "used"

    def __init__(self, mu: NotNegative = 0.1, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self.mu = mu

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z with the term μ/2 ‖w − z‖²."""
        # The gradient of μ/2 ‖w − z‖², which is added once per optimizer step, before clipping.
        engine.solve(cohort, start=server.model, terms=[Proximal(self.mu, server.z)])
