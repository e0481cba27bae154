"""FedBC: Federated Learning Beyond Consensus."""

from __future__ import annotations

import math
from typing import Literal

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.local import Engine, Proximal
from fedbc_lightning.server import DualAscent, RobustRule, ServerCallback, WeightedAverage
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class FedBC(FederatedAlgorithm):
    """FedBC: each client's model may differ from z within a tolerance; a multiplier λ_i penalises more than that.

    Problem:
        min_{z, x_i} Σ f_i(x_i)  subject to  ‖x_i − z‖² ≤ γ_i.

    Update::

        client    each step's gradient gets  2 λ_i (w − z),  from w = z;  x_i = the last w
        server    λ_i ← clip(λ_i + α_λ (‖w_i − z‖² − γ_i), λ_min, λ_max),    γ_i ← γ_i + α_γ λ_i  (old λ_i)
                  z ← Σ_{S_t} λ_j w_j / Σ_{S_t} λ_j  (new λ)

    State:
        Each client keeps λ_i ``dual`` and γ_i ``tolerance`` (N,), which are columns of ``clients.csv``, and x_i
        ``local_model`` (N, d + b); with momentum also ``dual_velocity`` and ``tolerance_velocity`` (N,).
    Communication:
        The server sends z; each client sends w_i and λ_i.
    Partial work:
        The partial work of stragglers is used, since λ_i takes the distance that the client has come.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        With λ_i frozen at 0 it is FedAvg with uniform weights; frozen at μ/2 it is FedProx(μ) with uniform weights (the
        paper writes λ = μ; its gradient is 2λ(w − z)). γ → ∞ (from λ_i = 0, with λ_min = 0) leaves local training
        unchanged.
    Departures:
        If all λ of a round are 0, z is the uniform mean of the clients' models; the public code divides by 0. γ_i is
        updated with the old λ_i. Local training starts from x_i in Algorithm 2 as printed, and from z in the public
        code; ``init_from`` chooses.

    References:
        "Federated Learning Beyond Consensus", Algorithms 1 and 2, eq. 11 (``server/dual_ascent.py``) and 13
        (``server/aggregation.py``).

    Args:
        dual_lr: Step size α_λ; 0 freezes λ_i. The paper's grid is 1e-7 to 1e-2.
        dual_init: Start value of λ_i.
        tolerance: ``"learned"`` starts γ_i at 0 and updates it as above. A number fixes one γ for all clients, a list
            of N numbers fixes γ_i for each client.
        tolerance_lr: Step size α_γ; None takes ``dual_lr``. It is allowed with ``tolerance="learned"`` only.
        dual_min: Lower bound λ_min.
        dual_max: Upper bound λ_max.
        dual_momentum: Momentum m of the updates of λ_i and γ_i, v ← m v + gradient; the public code takes 0.5.
        dual_momentum_style: ``"client"`` changes a client's velocities only in rounds in which it takes part.
            ``"public"`` follows the public code, in which absent clients' λ_i and γ_i move on (see ``DualAscent``).
        init_from: Start of local training: ``"global"`` starts at z as the public code does, ``"local"`` at x_i as the
            paper's Algorithm 2 is printed.
        robust_rule: Robust rule by which the server aggregates the w_i with the weights λ_i; None takes the mean. An
            attacker far from z also gets the largest λ_i, so bound it by ``dual_max`` or freeze λ (``dual_lr: 0``).

    Raises:
        ConfigurationError: A value is out of range, or ``tolerance_lr`` is given with a fixed tolerance.
    """

    has_local_model = True

    def __init__(
        self,
        dual_lr: float,
        dual_init: float = 0.0,
        tolerance: float | list[float] | Literal["learned"] = "learned",
        tolerance_lr: float | None = None,
        dual_min: float = 0.0,
        dual_max: float = math.inf,
        dual_momentum: float = 0.0,
        dual_momentum_style: Literal["client", "public"] = "client",
        init_from: Literal["global", "local"] = "global",
        robust_rule: RobustRule | None = None,
    ) -> None:
        self.init_from, self.robust_rule = init_from, robust_rule
        self.sends_update = init_from == "global"
        self.dual_ascent = DualAscent(
            dual_lr, dual_init, tolerance, tolerance_lr, dual_min, dual_max, dual_momentum, dual_momentum_style
        )

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare x_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train with the gradient 2 λ_i (w − z) added in every step, and stage the result as x_i."""
        # λ_i of the round before; in the public style it has coasted while other clients had their turns.
        dual = self.dual_ascent.state(cohort)["dual"]
        start = server.model if self.init_from == "global" else cohort["local_model"]
        # The gradient of λ_i ‖w − z‖² is 2 λ_i (w − z), and Proximal(μ) adds μ (w − z).
        engine.solve(cohort, start, terms=[Proximal(2 * dual, server.z)])
        cohort.stage("local_model", cohort.model)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the dual step, and then the mean weighted by the new λ."""
        # The order matters: the mean is weighted by the new λ_i (eq. 13), which DualAscent stages just before.
        return [self.dual_ascent, WeightedAverage(by="dual", rule=self.robust_rule)]
