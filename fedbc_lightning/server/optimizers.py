"""Server optimizers: steps of the server that take z minus the aggregate as a pseudo-gradient Δ̄."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedbc_lightning.core.checks import Fraction, Positive
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, ServerState, StateDeclaration


class ServerOptimizer(ServerCallback):
    """Base class of parts that come after the aggregation and replace its z by an optimizer step; buffers stay."""

    follows_aggregation = True

    def step(self, direction: Tensor, server: ServerState, clients: ClientStore, sums: Sums) -> Tensor:
        """Return the vector (d,) that is added to z, and stage the part's own state.

        Args:
            direction: The direction −Δ̄ = aggregate − z, (d,).
            server: The server's state.
            clients: The clients' state.
            sums: The reduced sums of the round.
        """
        raise NotImplementedError

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Replace the staged aggregate by z plus the step."""
        server.stage("z", server.z + self.step(server.staged("z") - server.z, server, clients, sums))


class ServerSGD(ServerOptimizer):
    """Takes a step of size η_s towards the aggregate: z ← z − η_s Δ̄.

    Args:
        lr: Server learning rate η_s; 1 takes the aggregate itself.
    """

    def __init__(self, lr: Positive = 1.0) -> None:
        self.lr = lr

    def step(self, direction: Tensor, server: ServerState, clients: ClientStore, sums: Sums) -> Tensor:
        """Return η_s times the direction."""
        return self.lr * direction

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Take the step; for η_s = 1 keep the aggregate, free of rounding."""
        # With 1, z + (mean − z) would round the mean; it stays as it was staged, bit for bit.
        if self.lr != 1:
            super().on_aggregate(server, clients, sums)


class ServerMomentum(ServerOptimizer):
    """Takes the step of FedAvgM, which is m ← β m − Δ̄ and z ← z + η_s m.

    Args:
        lr: Server learning rate η_s.
        momentum: Momentum β.

    References:
        Reddi et al. 2021, "Adaptive Federated Optimization".
    """

    def __init__(self, lr: Positive = 1.0, momentum: Fraction = 0.9) -> None:
        self.lr, self.momentum = lr, momentum

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the momentum m, which starts at 0."""
        state.server_vector("momentum", for_clients=False)

    def step(self, direction: Tensor, server: ServerState, clients: ClientStore, sums: Sums) -> Tensor:
        """Update and stage m, and return η_s m."""
        momentum = self.momentum * server["momentum"] + direction
        server.stage("momentum", momentum)
        return self.lr * momentum


class ServerAdaptive(ServerOptimizer):
    """Takes the adaptive steps of Reddi et al.: m ← β₁ m − (1 − β₁) Δ̄, z ← z + η_s m / (√v + τ).

    There is no bias correction. v starts as v⁰ = τ² and is updated by::

        adagrad   v ← v + Δ̄²
        adam      v ← β₂ v + (1 − β₂) Δ̄²
        yogi      v ← v − (1 − β₂) Δ̄² sign(v − Δ̄²)

    Args:
        kind: Rule for v: ``"adam"``, ``"adagrad"`` or ``"yogi"``.
        lr: Server learning rate η_s.
        beta1: Decay rate β₁ of m.
        beta2: Decay rate β₂ of v; adagrad does not use it.
        tau: Degree of adaptivity τ.

    References:
        Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.
    """

    def __init__(
        self,
        kind: Literal["adam", "adagrad", "yogi"] = "adam",
        lr: Positive = 0.01,
        beta1: Fraction = 0.9,
        beta2: Fraction = 0.99,
        tau: Positive = 1e-3,
    ) -> None:
        self.kind, self.lr, self.beta1, self.beta2, self.tau = kind, lr, beta1, beta2, tau

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the moments m, which starts at 0, and v, which starts at τ²."""
        state.server_vector("momentum", for_clients=False)
        # v₀ = τ², as in Algorithm 2: the first steps are bounded by η / τ.
        state.server_vector("second_moment", self.tau**2, for_clients=False)

    def step(self, direction: Tensor, server: ServerState, clients: ClientStore, sums: Sums) -> Tensor:
        """Update and stage m and v, and return the step."""
        square, second = direction.square(), server["second_moment"]
        if self.kind == "adagrad":
            second = second + square
        elif self.kind == "adam":
            second = self.beta2 * second + (1 - self.beta2) * square
        else:
            # Yogi moves v towards Δ² by an additive step, so v falls slowly where gradients become sparse.
            second = second - (1 - self.beta2) * square * torch.sign(second - square)
        momentum = self.beta1 * server["momentum"] + (1 - self.beta1) * direction
        server.stage("momentum", momentum)
        server.stage("second_moment", second)
        # No bias correction, as in Reddi et al. 2021; τ stands outside of the root and bounds how adaptive a step is.
        return self.lr * momentum / (second.sqrt() + self.tau)
