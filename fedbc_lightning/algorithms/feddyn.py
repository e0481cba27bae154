"""FedDyn (Acar et al. 2021)."""

from __future__ import annotations

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import Positive
from fedbc_lightning.local import Engine, Linear, Proximal, Term
from fedbc_lightning.server import DynamicRegularization, RobustRule, ServerCallback, WeightedAverage
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class FedDyn(FederatedAlgorithm):
    """FedDyn: each client's objective is tilted so that local optima agree with the global one.

    Problem:
        min_w (1/N) Σ f_i(w), exactly.

    Update::

        client    each step's gradient gets  α (w − z) − h_i,  from w = z;    h_i ← h_i − α (w_i − z)
        server    h ← h − (α/N) Σ_{S_t} (w_i − z),    z ← mean_{S_t}(w_i) − h/α

    State:
        Each client keeps h_i (N, d) and the server keeps h (d,); both are named ``correction`` and start at 0.
    Communication:
        The server sends z; each client sends w_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        No choice of the arguments gives another method; its only fixed points are those of the mean loss.
    Departures:
        No departure from the paper is known.

    References:
        Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", Algorithm 1.

    Args:
        alpha: Regularization parameter α > 0. The paper's grid is 0.001, 0.01, 0.1.
        robust_rule: Robust rule by which the server aggregates the w_i; None takes the mean. h stays a plain sum.

    Raises:
        ConfigurationError: A value is out of range.
    """

    scalars_up = 0

    def __init__(self, alpha: Positive = 0.01, robust_rule: RobustRule | None = None) -> None:
        self.alpha, self.robust_rule = alpha, robust_rule

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare h_i."""
        state.client_vector("correction")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z with the terms α/2 ‖w − z‖² − ⟨h_i, w⟩, and stage the new h_i."""
        # ∇f_i(w) − h_i + α (w − z), where h_i estimates ∇f_i at the optimum, so that both penalties cancel there.
        terms: list[Term] = [Proximal(self.alpha, server.z), Linear(-cohort["correction"])]
        engine.solve(cohort, start=server.model, terms=terms)
        # h_i ← h_i − α (w_i − z): the first-order condition of the subproblem, solved for the new ∇f_i(w_i).
        cohort.stage("correction", cohort["correction"] - self.alpha * (cohort.w - server.z))

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the uniform mean, and then its correction."""
        return [WeightedAverage("uniform", self.robust_rule), DynamicRegularization(self.alpha)]
