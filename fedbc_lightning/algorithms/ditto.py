"""Ditto (Li et al. 2021)."""

from __future__ import annotations

from typing import Any

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import Count, NotNegative
from fedbc_lightning.local import Engine, Proximal
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class Ditto(FedAvg):
    """Ditto: FedAvg trains z, and each client also trains a personal model v_i that is held near z.

    Problem:
        min_{v_i} f_i(v_i) + λ/2 ‖v_i − z*‖², where z* is the solution of FedAvg's problem.

    Update::

        client    v_i ← E_p epochs from v_i, each step's gradient gets  λ (v − z)
                  w_i ← E epochs from z
        server    z ← Σ p_i w_i

    State:
        Each client keeps v_i ``local_model`` (N, d + b).
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is used; a straggler trains both models for its part of the epochs.
    Local model:
        A client's own model is v_i.
    Degenerate cases:
        With λ = 0, v_i is the model of Local. z is the same as in FedAvg for every λ, but a client whose v_i diverges
        is left out of z, too.
    Departures:
        Both trainings see the client's batches in the same order. The client's hooks are called once, around both, and
        ``clients.csv`` shows the numbers of w_i.

    References:
        Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", Algorithm 1.

    Args:
        penalty: Strength λ of the pull to z. The paper's grid is 0.05, 0.1, 0.2, 1, 2.
        personal_epochs: Epochs E_p of v_i; None takes the trainer's local epochs or steps.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    has_local_model = True
    takes_local_parameters = False
    partial_work = "used"

    def __init__(self, penalty: NotNegative = 0.1, personal_epochs: Count | None = None, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self.penalty, self.personal_epochs = penalty, personal_epochs

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare v_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train v_i with the pull to z, then w_i from z."""
        # The personal step comes first, and by a purpose of its own: its batches and dropout masks are other draws, so
        # z is that of FedAvg bit for bit, whatever the penalty is.
        start, pull = cohort["local_model"], Proximal(self.penalty, server.z)
        # Not the last: the training of w_i follows, to which hooks and the logged losses belong.
        engine.solve(cohort, start, [pull], epochs=self.personal_epochs, purpose="personal", is_last=False)
        cohort.stage("local_model", cohort.model)
        super().client_update(engine, cohort, server)
