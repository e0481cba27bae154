"""Local training without federation."""

from __future__ import annotations

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.local import Engine
from fedbc_lightning.server import ServerCallback, WeightedAverage
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class Local(FederatedAlgorithm):
    """Local: every client trains alone, as a lower bound that a personalised method must beat.

    Problem:
        min_{x_i} f_i(x_i) for each client.

    Update::

        client    x_i ← E epochs of the user's optimizer from x_i
        server    z ← the mean of x_i over S_t, for reporting only

    State:
        Each client keeps x_i ``local_model`` (N, d + b).
    Communication:
        Nothing is sent.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        It is Fed+ with σ = 0 and l = 0.
    Departures:
        No departure from the paper is known.

    References:
        The row λ = 0 of Table 1 of Kundu et al., "Robustness and Personalization in Federated Learning" (Fed+).
    """

    has_local_model = True
    sends_update = False

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare x_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from x_i by default local training."""
        engine.solve(cohort, start=cohort["local_model"])
        cohort.stage("local_model", cohort.model)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean, which is reported as z and which no client receives."""
        # A z for comparison only: no client ever receives it.
        return [WeightedAverage(by="uniform")]

    def num_exchanges(self, server: ServerState) -> int:
        """Return 0, since nothing is sent."""
        return 0
