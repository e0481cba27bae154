"""Ditto (Li et al. 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import check_at_least
from fedbc_lightning.local import Proximal
from fedbc_lightning.server import RobustRule
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


class Ditto(FedAvg):
    """Ditto: FedAvg for z, and beside it a personal model v_i held near z.

    Problem:
        min_{v_i} f_i(v_i) + λ/2 ‖v_i − z*‖²,  z* the solution of FedAvg's problem.

    Update::

        client    v_i ← E_p epochs from v_i, each step's gradient gets  λ (v − z)
                  w_i ← E epochs from z
        server    z ← Σ p_i w_i

    State:
        v_i ``local_model`` (N, d + b).
    Communication:
        z down; w_i and n_i up.
    Partial work:
        Used: a straggler trains both models for its share.
    Local model:
        v_i.
    Degenerate cases:
        λ = 0: v_i is Local. z is FedAvg's whatever λ is (but a client whose v_i diverges is left out with both).
    Departures:
        Both trainings see the client's batches in the same order; the client's hooks go around both, and
        ``clients.csv`` shows the numbers of w_i.

    References:
        Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", Algorithm 1.

    Args:
        penalty: λ. The paper's grid: 0.05, 0.1, 0.2, 1, 2.
        personal_epochs: E_p; None: the trainer's local epochs or steps.
        weighting: ``"samples"``: p_i = n_i / Σ n_j. ``"uniform"``: p_i = 1 / S.
        robust_rule: What the server does with the w_i in place of the mean; None: the mean.

    Raises:
        ConfigurationError: A value outside its range.
    """

    has_local_model = True
    partial_work = "used"

    def __init__(
        self,
        penalty: float = 0.1,
        personal_epochs: int | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        robust_rule: RobustRule | None = None,
    ) -> None:
        super().__init__(weighting, robust_rule)
        check_at_least("algorithm.penalty", penalty, 0)
        if personal_epochs is not None:
            check_at_least("algorithm.personal_epochs", personal_epochs, 1, whole=True)
        self.penalty, self.personal_epochs = penalty, personal_epochs

    def declare_state(self, state: StateDeclaration) -> None:
        """v_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """v_i towards z, then w_i from z."""
        terms = [Proximal(self.penalty, server.z)]
        engine.solve(
            cohort,
            start=cohort.local_model,
            terms=terms,
            epochs=self.personal_epochs,
            purpose="personal",
            is_last=False,
        )
        cohort.stage("local_model", cohort.model)
        super().client_update(engine, cohort, server)
