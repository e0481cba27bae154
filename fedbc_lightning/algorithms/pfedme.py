"""pFedMe (Dinh et al. 2020)."""

from __future__ import annotations

import torch

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import Count, Positive
from fedbc_lightning.local import Engine, MoreauEnvelope
from fedbc_lightning.server import RobustRule, ServerCallback, ServerSGD
from fedbc_lightning.server.aggregation import Weighting
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class PFedMe(FedAvg):
    """pFedMe: personal models θ_i tied to z by a Moreau envelope.

    Problem:
        min_w (1/N) Σ min_{θ_i} f_i(θ_i) + λ/2 ‖θ_i − w‖².

    Update::

        client    θ = w = z; on each batch b:  K times  θ ← θ − η_θ (g_i(θ; b) + λ (θ − w));    w ← w − η λ (w − θ)
        server    z ← (1 − β) z + β Σ p_i w_i

    State:
        Each client keeps θ_i ``local_model`` (N, d + b).
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is θ_i, the last θ of the client's last round.
    Degenerate cases:
        No choice of the arguments gives another method.
    Departures:
        The steps are plain SGD; of the model's optimizer only η and the weight decay of torch's SGD are used. The paper
        weights uniformly, public codes by samples. The FedBC code tests w, not θ. If β < 1, the buffers still are the
        mean of the clients' buffers.

    References:
        Dinh et al. 2020, "Personalized Federated Learning with Moreau Envelopes", Algorithm 1.

    Args:
        penalty: Strength λ of the pull to w. The paper's grid is 15 to 30 on MNIST.
        personal_lr: Step size η_θ of θ.
        num_inner_steps: Number K of steps of θ per batch.
        server_lr: Fraction β of the way from z to the mean that the server takes.
        weighting: Weights of the mean: ``"uniform"`` takes p_i = 1 / S, ``"samples"`` takes p_i = n_i / Σ n_j.
        robust_rule: Robust rule by which the server aggregates the w_i; None takes the mean.

    Raises:
        ConfigurationError: A value is out of range.
    """

    has_local_model = True
    partial_work = "used"

    def __init__(
        self,
        penalty: Positive = 15.0,
        personal_lr: Positive = 0.005,
        num_inner_steps: Count = 5,
        server_lr: Positive = 1.0,
        weighting: Weighting = "uniform",
        robust_rule: RobustRule | None = None,
    ) -> None:
        super().__init__(weighting, robust_rule)
        self.server_sgd = ServerSGD(server_lr)
        self.solver = MoreauEnvelope(penalty, personal_lr, num_inner_steps)

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError if the trainer or the model asks for anything but plain SGD steps."""
        engine.check_solver("pFedMe", self.solver)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare θ_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z by steps on the envelope, and stage the last θ as the client's own model."""
        engine.solve(cohort, start=server.model, solver=self.solver)
        # θ_i, not w_i, is the personal model: w_i is the client's copy of the global one.
        cohort.stage("local_model", torch.cat([self.solver.theta, cohort.buffers], dim=1))

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean, and then the step by the fraction β towards it."""
        return [*super().server_callbacks(engine), self.server_sgd]
