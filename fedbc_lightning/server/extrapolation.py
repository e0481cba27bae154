"""The server's half of FedExP: its adaptive step size."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedbc_lightning.server.base import Sums
from fedbc_lightning.server.optimizers import ServerOptimizer
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


class Extrapolation(ServerOptimizer):
    """Takes the step z ← z − η_s Δ̄ with η_s = max(1, Σ p_i ‖Δ_i‖² / (2 (‖Δ̄‖² + ε))); p_i are the mean's weights.

    Args:
        epsilon: ε, a small constant in the denominator.
        style: ``"paper"`` takes the formula above. ``"public"`` takes S ε in place of ε, and multiplies ε by 0.998²
            in every round, the first included.

    References:
        Jhunjhunwala et al. 2023, "FedExP: Speeding Up Federated Averaging via Extrapolation", eq. 7.
    """

    DECAY = 0.998

    def __init__(self, epsilon: float, style: Literal["paper", "public"]) -> None:
        self.epsilon, self.style = epsilon, style

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the z of the round before."""
        state.server_vector("previous_z", initial="z")

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Record ‖Δ_i‖²."""
        cohort.record("distance", (cohort.w - server.z).to(sums.dtype).square().sum(dim=1))

    def step(self, direction: Tensor, server: ServerState, clients: ClientStore, sums: Sums) -> Tensor:
        """Compute η_s, and return η_s times the direction."""
        epsilon = self.epsilon
        if self.style == "public":
            # The official code: ε is S times smaller beside sums, and falls with the square of the decayed learning
            # rate.
            epsilon *= self.DECAY ** (2 * server.round) * len(server.valid_records)
        mean_square = sum(record["weight"] * record["distance"] for record in server.valid_records)
        square_mean = torch.linalg.vector_norm(direction, dtype=sums.dtype).square().item()
        # η_g = max(1, Σ ‖Δ_i‖² / (2S (‖Δ̄‖² + ε))): the more the updates differ, the shorter is their mean, and the
        # further z goes.
        lr = max(1.0, mean_square / (2 * (square_mean + epsilon)))
        server.log("server/lr", lr)
        server.stage("previous_z", server.z)
        return lr * direction
