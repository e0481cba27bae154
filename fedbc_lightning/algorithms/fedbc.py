"""FedBC: Federated Learning Beyond Consensus."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import check_choice
from fedbc_lightning.local import Proximal
from fedbc_lightning.server import DualAscent, RobustRule, ServerCallback, WeightedAverage
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


class FedBC(FederatedAlgorithm):
    """FedBC: each client may stay within a tolerance of the global model; its multiplier λ_i prices what lies beyond.

    Problem:
        min_{z, x_i} Σ f_i(x_i)  subject to  ‖x_i − z‖² ≤ γ_i.

    Update::

        client    each step's gradient gets  2 λ_i (w − z),  from w = z;  x_i = the last w
        server    λ_i ← clip(λ_i + α_λ (‖w_i − z‖² − γ_i), λ_min, λ_max),    γ_i ← γ_i + α_γ λ_i  (old λ_i)
                  z ← Σ_{S_t} λ_j w_j / Σ_{S_t} λ_j  (new λ)

    State:
        λ_i ``dual`` and γ_i ``tolerance`` (N,), in ``clients.csv``; x_i ``local_model`` (N, d + b); with momentum
        ``dual_velocity`` and ``tolerance_velocity`` (N,).
    Communication:
        z down; w_i and λ_i up.
    Partial work:
        Used: λ_i prices however far the client got.
    Local model:
        x_i.
    Degenerate cases:
        λ_i frozen at 0 is FedAvg with uniform weights, frozen at μ/2 it is FedProx(μ) with uniform weights (the paper
        writes λ = μ; its gradient is 2λ(w − z)). γ → ∞ (from λ_i = 0, λ_min = 0) leaves local training
        untouched.
    Departures:
        Where all λ of a round are 0 the public code divides by 0; here z is their uniform mean. γ_i moves with the old
        λ_i. Algorithm 2 as printed starts from x_i, the public code from z: ``init_from``.

    References:
        "Federated Learning Beyond Consensus", Algorithms 1 and 2, eq. 11 (``server/dual_ascent.py``) and 13
        (``server/aggregation.py``).

    Args:
        dual_lr: α_λ; 0 freezes λ_i. The paper's grid: 1e-7 ... 1e-2.
        dual_init: λ_i at the start.
        tolerance: ``"learned"``: γ_i starts at 0 and follows the ascent above. A number: γ for all clients, fixed. A
            list of N numbers: γ_i, fixed.
        tolerance_lr: α_γ; None: the same as ``dual_lr``. Only with ``tolerance="learned"``.
        dual_min: λ_min.
        dual_max: λ_max.
        dual_momentum: Momentum m of both ascents, v ← m v + gradient (the public code: 0.5).
        dual_momentum_style: ``"client"``: a velocity moves when its client takes part. ``"public"``: the public code's
            loop, in which absent clients coast (see ``DualAscent``).
        init_from: Where local training starts: ``"global"``: at z (the public code). ``"local"``: at x_i (the paper's
            Algorithm 2 as printed).
        robust_rule: What the server does with the w_i, weighted by λ_i, in place of the mean; None: the mean. An
            attacker far from z also gets the largest λ_i: bound it by ``dual_max``, or freeze λ (``dual_lr: 0``).

    Raises:
        ConfigurationError: A value outside its range; ``tolerance_lr`` with a fixed tolerance.
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
        check_choice("algorithm.init_from", init_from, ("global", "local"))
        self.init_from, self.robust_rule = init_from, robust_rule
        self.dual_ascent = DualAscent(
            dual_lr, dual_init, tolerance, tolerance_lr, dual_min, dual_max, dual_momentum, dual_momentum_style
        )

    def declare_state(self, state: StateDeclaration) -> None:
        """x_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Local training with "2 λ_i (w − z)" in every step; the result is x_i."""
        dual = self.dual_ascent.state(cohort)["dual"]
        start = server.model if self.init_from == "global" else cohort.local_model
        engine.solve(cohort, start, terms=[Proximal(2 * dual, server.z)])
        cohort.stage("local_model", cohort.model)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """The dual step, then the mean weighted with the new λ."""
        return [self.dual_ascent, WeightedAverage(by="dual", rule=self.robust_rule)]
