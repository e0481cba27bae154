"""The server's half of FedLi: step sizes from line searches and losses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedbc_lightning.core.checks import Fraction, NotNegative, Positive, check_arguments
from fedbc_lightning.local import Engine
from fedbc_lightning.server.base import Sums
from fedbc_lightning.server.optimizers import ServerOptimizer
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


class LargestClientStep(ServerOptimizer):
    """Takes the step z ← z − η_s Δ̄ with η_s the largest of the clients' last step sizes (scalar ``last_step``).

    A client that made no line search does not count; if no client made one, η_s = 1.

    References:
        "Towards Hyper-parameter-free Federated Learning", FedLi-LS.
    """

    reads = ("last_step",)

    def step(self, direction: Tensor, server: ServerState, clients: ClientStore, sums: Sums) -> Tensor:
        """Compute η_s, and return η_s times the direction."""
        # Clients at an optimum have tried no step, and their η = 1 would be the largest.
        searched = [record["client"] for record in server.valid_records if record.get("has_searched")]
        lr = clients.staged_scalar("last_step")[searched].max().item() if searched else 1.0
        server.log("server/lr", lr)
        return lr * direction


class FrankWolfe(ServerOptimizer):
    """Takes a Deep-Frank-Wolfe step, whose size follows from the clients' losses.

    Here δ = Δ̄, F = Σ p_i (mean over client i's batches of the loss before each step), and r = wd z for the parameters
    of the model's optimizer, 0 for others::

        γ = clip((F − η_s ⟨δ, r⟩) / (η_s ‖δ‖² + 1e-5), 0, 1)
        z ← z − η_s (r + γ δ);    m ← μ m − η_s γ (δ + r),    z ← z + μ m

    Args:
        lr: Server learning rate η_s.
        momentum: Momentum μ.
        weight_decay: Weight decay wd.

    References:
        "Towards Hyper-parameter-free Federated Learning", FedLi-LU; Berrada et al. 2019.
    """

    def __init__(
        self,
        lr: Positive = 0.01,
        momentum: Fraction = 0.9,
        weight_decay: NotNegative = 1e-5,
    ) -> None:
        check_arguments(FrankWolfe, locals(), "algorithm: FrankWolfe")
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Note how many parameters are optimized; only those decay."""
        self._num_optimized = engine.layout.num_optimized

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the momentum m, which starts at 0."""
        state.server_vector("momentum")

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Record the clients' mean loss over batches."""
        for record, loss in zip(cohort.records, cohort.batch_loss.tolist(), strict=True):
            if math.isfinite(loss):
                record["batch_loss"] = loss

    def step(self, direction: Tensor, server: ServerState, clients: ClientStore, sums: Sums) -> Tensor:
        """Compute γ, stage the momentum, and return the step."""
        delta = -direction.to(sums.dtype)
        decay = self.weight_decay * server.z.to(sums.dtype)
        # Parameters outside of the optimizer are not trained, so they do not decay either.
        decay[self._num_optimized :] = 0
        with_loss = [record for record in server.valid_records if "batch_loss" in record]
        share = sum(record["weight"] for record in with_loss)
        loss = sum(record["weight"] * record["batch_loss"] for record in with_loss) / share if share else 0.0
        # The Frank-Wolfe step of the conditional-gradient problem on the segment between 0 and δ: closed form, clipped
        # to the segment.
        gamma = (loss - self.lr * torch.dot(delta, decay)) / (self.lr * delta.square().sum() + 1e-5)
        gamma = gamma.clamp(0, 1)
        server.log("server/frank_wolfe_gamma", gamma.item())
        momentum = self.momentum * server["momentum"] - self.lr * gamma * (delta + decay)
        server.stage("momentum", momentum)
        return -self.lr * (decay + gamma * delta) + self.momentum * momentum
