"""Steps of the server whose size follows from what the clients report: FedExP, FedLi, and q-FedAvg."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedbc_lightning.core.checks import Fraction, NotNegative, Positive
from fedbc_lightning.local import Engine
from fedbc_lightning.server.base import ServerCallback, Sums
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
        state.server_vector("previous_z", initial="z", for_clients=False)

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Record ‖Δ_i‖²."""
        cohort.record("distance", cohort.squared_distance(server.z))

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
        lr = clients.scalar("last_step", staged=True)[searched].max().item() if searched else 1.0
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

    def __init__(self, lr: Positive = 0.01, momentum: Fraction = 0.9, weight_decay: NotNegative = 1e-5) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Note how many parameters are optimized; only those decay."""
        self._num_optimized = engine.layout.num_optimized

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the momentum m, which starts at 0."""
        state.server_vector("momentum", for_clients=False)

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Record the clients' mean loss over batches."""
        for record, loss in zip(cohort.records, cohort.losses, strict=True):
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


class FairStep(ServerCallback):
    """Takes the step of q-FedAvg, z ← z − Σ Δ_i / Σ h_i.

    With Δw_i = L (z − w_i) and F_i the training loss at z before training::

        Δ_i = F_i^q Δw_i,    h_i = q F_i^(q−1) ‖Δw_i‖² + L F_i^q

    This part comes after the aggregation and replaces its z; it keeps the buffers. It reads the message ``loss_at_z``.

    Args:
        q: Fairness parameter q ≥ 0; a larger one gives clients with a high loss more weight.
        lipschitz: Lipschitz constant L; None takes 1 / η with the mean η of the client's steps.
        style: ``"paper"``: the step above. ``"public"``: that of the FedBC authors' code, in which h_i has
            ‖z − w_i‖² in place of ‖Δw_i‖², and both sums are weighted by the clients' numbers of samples.

    References:
        Li et al. 2020, "Fair Resource Allocation in Federated Learning", Algorithm 2.
    """

    follows_aggregation = True
    messages = ("loss_at_z",)

    def __init__(self, q: float, lipschitz: float | None, style: Literal["paper", "public"] = "paper") -> None:
        self.q, self.lipschitz, self.style = q, lipschitz, style

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the loss at z."""
        state.client_message("loss_at_z", "number")

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the clients that took a step."""
        # There is one optimizer group; outside of it the step size is 0 and w = z.
        rate = cohort.step_size.amax(dim=1, keepdim=True)
        if self.lipschitz is not None:
            rate = torch.full_like(rate, 1 / self.lipschitz)
        loss = (cohort.messages["loss_at_z"] + 1e-10).to(rate.device, sums.dtype)[:, None]
        cohort.record("loss_at_z", cohort.messages["loss_at_z"])
        # L = 1/η, as in the paper: Δ_k = L (z − w_k) is what the gradient would be, had the client taken one step.
        lipschitz = 1 / rate.to(sums.dtype)
        move = (server.z - cohort.w).to(sums.dtype)
        update = lipschitz * move
        fair_update = loss**self.q * update
        squares = (move if self.style == "public" else update).square().sum(dim=1, keepdim=True)
        # h_k = q F_k^(q−1) ‖Δ_k‖² + L F_k^q estimates the Lipschitz constant of F_k^(q+1) / (q+1), so no step size
        # needs to be tuned for a new q.
        total = self.q * loss ** (self.q - 1) * squares + lipschitz * loss**self.q
        weights = cohort.num_samples if self.style == "public" else torch.ones(len(cohort), dtype=torch.float64)
        # A client without a step, or with steps of size 0, has w_i = z and no finite 1 / η: it does not count.
        counts = cohort.valid & (cohort.num_steps > 0) & (rate[:, 0] > 0).cpu()
        is_counted = counts.to(rate.device)
        sums.add_rows("fair_update", fair_update[is_counted], weights[counts])
        sums.add("fair_total", (total * weights.to(total)[:, None])[is_counted].sum(dim=0))
        sums.add("num_counted", counts.sum().to(sums.device, sums.dtype))

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Replace the staged z, unless no client took a step."""
        if sums["num_counted"] > 0:
            server.stage("z", server.z - sums["fair_update"] / sums["fair_total"])
