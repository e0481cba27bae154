"""The server's half of FedDyn: its correction h."""

from __future__ import annotations

from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


class DynamicRegularization(ServerCallback):
    """Updates h ← h + (1/N) Σ_{S_t} (h_i⁺ − h_i), and corrects the aggregate: z ← aggregate − h/α.

    This part comes after the aggregation. It needs the client vector ``correction`` (h_i), staged as
    h_i⁺ = h_i − α (w_i − z).

    Args:
        alpha: Regularization parameter α.

    References:
        Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", Algorithm 1.
    """

    reads = ("correction",)
    follows_aggregation = True

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the correction h, which starts at 0."""
        state.server_vector("correction")

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sum of the changes of the h_i."""
        sums.declare("correction", server.z.numel())

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the changes of the valid clients' h_i."""
        # h is the mean of all h_i; only those of this round change, so their changes suffice.
        sums.add_valid("correction", cohort, cohort.change("correction"))

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Update h, then correct the staged z."""
        correction = server["correction"] + sums["correction"] / server.num_clients
        server.stage("correction", correction)
        # z ← mean(w_i) − h/α with the new h, as in Algorithm 1: the state corrects z itself, not the next gradients.
        server.stage("z", server.staged("z") - correction / self.alpha)
