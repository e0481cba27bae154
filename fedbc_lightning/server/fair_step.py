"""The server's half of q-FedAvg: its step, in which clients with a high loss count more."""

from __future__ import annotations

from typing import Literal

import torch

from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState


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

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sums Σ Δ_i and Σ h_i, and the number of clients in them."""
        sums.declare("fair_update", server.z.numel())
        sums.declare("fair_total")
        sums.declare("num_counted")

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
