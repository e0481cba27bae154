"""pFedMe (Dinh et al. 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import check_at_least
from fedbc_lightning.local import MoreauEnvelope
from fedbc_lightning.server import RobustRule, ServerCallback, ServerSGD
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


class PFedMe(FedAvg):
    """pFedMe: personal models θ_i tied to z by a Moreau envelope.

    Problem:
        min_w (1/N) Σ min_{θ_i} f_i(θ_i) + λ/2 ‖θ_i − w‖².

    Update::

        client    θ = w = z; on each batch b:  K times  θ ← θ − η_θ (g_i(θ; b) + λ (θ − w));    w ← w − η λ (w − θ)
        server    z ← (1 − β) z + β Σ p_i w_i

    State:
        θ_i ``local_model`` (N, d + b).
    Communication:
        z down; w_i and n_i up.
    Partial work:
        Used.
    Local model:
        θ_i, the last of the client's last round.
    Degenerate cases:
        None that is another method.
    Departures:
        Plain SGD steps; of the model's optimizer η is used, and the weight decay of torch's SGD. The paper weights
        uniformly, public codes by samples. The FedBC code tests w, not θ. With β < 1 buffers take the whole mean.

    References:
        Dinh et al. 2020, "Personalized Federated Learning with Moreau Envelopes", Algorithm 1.

    Args:
        penalty: λ. The paper's grid: 15 ... 30 on MNIST.
        personal_lr: η_θ.
        num_inner_steps: K.
        server_lr: β.
        weighting: ``"uniform"``: p_i = 1 / S. ``"samples"``: p_i = n_i / Σ n_j.
        robust_rule: What the server does with the w_i in place of the mean; None: the mean.

    Raises:
        ConfigurationError: A value outside its range.
    """

    has_local_model = True
    partial_work = "used"

    def __init__(
        self,
        penalty: float = 15.0,
        personal_lr: float = 0.005,
        num_inner_steps: int = 5,
        server_lr: float = 1.0,
        weighting: Literal["samples", "uniform"] = "uniform",
        robust_rule: RobustRule | None = None,
    ) -> None:
        super().__init__(weighting, robust_rule)
        check_at_least("algorithm.penalty", penalty, 0, strict=True)
        check_at_least("algorithm.personal_lr", personal_lr, 0, strict=True)
        check_at_least("algorithm.num_inner_steps", num_inner_steps, 1, whole=True)
        self.server_sgd = ServerSGD(server_lr)
        self.solver = MoreauEnvelope(penalty, personal_lr, num_inner_steps)

    def check(self, engine: Engine) -> None:
        """Plain steps."""
        engine.check_solver("pFedMe", self.solver)

    def declare_state(self, state: StateDeclaration) -> None:
        """θ_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Steps on the envelope from z; the last θ is the personal model."""
        engine.solve(cohort, start=server.model, solver=self.solver)
        cohort.stage("local_model", torch.cat([self.solver.theta, cohort.buffers], dim=1))

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """The mean, then β of the way to it."""
        return [*super().server_callbacks(engine), self.server_sgd]
