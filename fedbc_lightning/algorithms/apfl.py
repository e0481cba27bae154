"""APFL (Deng et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import UnitInterval
from fedbc_lightning.local import Engine, Mixture
from fedbc_lightning.state import Cohort, ServerState, StagedClient, StateDeclaration


class APFL(FedAvg):
    """APFL: each client mixes the global model with a model of its own, by a weight that may adapt.

    Problem:
        min_{v_i} f_i(α_i v_i + (1 − α_i) z*), where z* is the solution of FedAvg's problem.

    Update::

        client    w = z; on each batch, both gradients at the old (w, v), v̄ = α v + (1 − α) w:
                  w ← w − η g_i(w),    v ← v − η α g_i(v̄)
                  adaptive, on the round's first batch:  α ← clip(α − η ⟨v − w, g_i(v̄)⟩, 0, 1)
        server    z ← Σ p_i w_i

    State:
        Each client keeps v_i ``local_model`` (N, d + b), which starts as z⁰, and α_i ``mixture`` (N,), a column of
        ``clients.csv``.
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is α_i v_i + (1 − α_i) z with the current z.
    Degenerate cases:
        α = 0, not adapted, is FedAvg with plain SGD. z never depends on α.
    Departures:
        The steps are plain SGD; of the model's optimizer only η and the weight decay of torch's SGD are used. An
        adapted α is used from the next batch on. w and v share the buffers, which both forward passes change.

    References:
        Deng et al. 2020, "Adaptive Personalized Federated Learning", Algorithm 1, eq. 11.

    Args:
        mixture: Start value of the weights α_i, in [0, 1].
        adaptive: Whether α_i is adapted, once per round.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    has_local_model = True
    partial_work = "used"

    def __init__(self, mixture: UnitInterval = 0.5, adaptive: bool = False, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self.mixture, self.adaptive = mixture, adaptive

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError if the trainer or the model asks for anything but plain SGD steps."""
        engine.check_solver("APFL", Mixture)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare v_i and α_i."""
        state.client_model("local_model")
        state.client_scalar("mixture", self.mixture)

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train w_i from z and v_i from its last value, and stage v_i and α_i."""
        # v_i has buffers behind its d parameters, but the mixture is one of parameters: both forward passes share the
        # buffers, so that those after training belong to v_i as well as to w_i.
        v = cohort["local_model"][:, : server.z.numel()]
        solver = Mixture(v, cohort["mixture"][:, None], self.adaptive)
        engine.solve(cohort, start=server.model, solver=solver)
        cohort.stage("local_model", torch.cat([solver.v, cohort.buffers], dim=1))
        if self.adaptive:
            # α_i is a scalar of the client, kept in float64 on the CPU like λ_i, so that clients.csv shows what is
            # used.
            cohort.stage("mixture", solver.mixture[:, 0].cpu().double())

    def local_model(self, client: StagedClient, model: Tensor) -> Tensor:
        """Return the mixture of v_i and the current z."""
        # The mixture with the present z in the place of w_i, which the client no longer has.
        share = client["mixture"]
        return share * client["local_model"] + (1 - share) * model
