"""APFL (Deng et al. 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import check_share
from fedbc_lightning.local import Mixture
from fedbc_lightning.server import RobustRule
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState, StagedClient, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


class APFL(FedAvg):
    """APFL: each client mixes the global model with one of its own, in a share that may adapt.

    Problem:
        min_{v_i} f_i(α_i v_i + (1 − α_i) z*),  z* the solution of FedAvg's problem.

    Update::

        client    w = z; on each batch, both gradients at the old (w, v), v̄ = α v + (1 − α) w:
                  w ← w − η g_i(w),    v ← v − η α g_i(v̄)
                  adaptive, on the round's first batch:  α ← clip(α − η ⟨v − w, g_i(v̄)⟩, 0, 1)
        server    z ← Σ p_i w_i

    State:
        v_i ``local_model`` (N, d + b), z⁰ at the start; α_i ``mixture`` (N,), in ``clients.csv``.
    Communication:
        z down; w_i and n_i up.
    Partial work:
        Used.
    Local model:
        α_i v_i + (1 − α_i) z with the current z.
    Degenerate cases:
        α = 0 fixed: FedAvg with plain SGD. z never depends on α.
    Departures:
        Plain SGD steps; of the model's optimizer η is used, and the weight decay of torch's SGD. An adapted α counts
        from the next batch on.
        Both forward passes move the buffers, which w and v share.

    References:
        Deng et al. 2020, "Adaptive Personalized Federated Learning", Algorithm 1, eq. 11.

    Args:
        mixture: α_i at the start, in [0, 1].
        adaptive: Whether α_i moves, once per round.
        weighting: ``"samples"``: p_i = n_i / Σ n_j. ``"uniform"``: p_i = 1 / S.
        robust_rule: What the server does with the w_i in place of the mean; None: the mean.

    Raises:
        ConfigurationError: A value outside its range.
    """

    has_local_model = True
    partial_work = "used"

    def __init__(
        self,
        mixture: float = 0.5,
        adaptive: bool = False,
        weighting: Literal["samples", "uniform"] = "samples",
        robust_rule: RobustRule | None = None,
    ) -> None:
        super().__init__(weighting, robust_rule)
        check_share("algorithm.mixture", mixture, closed=True)
        self.mixture, self.adaptive = mixture, adaptive

    def check(self, engine: Engine) -> None:
        """Plain steps."""
        engine.check_solver("APFL", Mixture)

    def declare_state(self, state: StateDeclaration) -> None:
        """v_i and α_i."""
        state.client_model("local_model")
        state.client_scalar("mixture", self.mixture)

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Both models at once."""
        v = cohort.local_model[:, : server.z.numel()]
        solver = Mixture(v, cohort.mixture[:, None], self.adaptive)
        engine.solve(cohort, start=server.model, solver=solver)
        cohort.stage("local_model", torch.cat([solver.v, cohort.buffers], dim=1))
        if self.adaptive:
            cohort.stage("mixture", solver.mixture[:, 0].cpu().double())

    def local_model(self, client: StagedClient, model: Tensor) -> Tensor:
        """The mixture with the current z."""
        share = client["mixture"]
        return share * client["local_model"] + (1 - share) * model
