"""FedNova's mean of updates that are normalised by the clients' steps."""

from __future__ import annotations

import math
from typing import Literal

import torch

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.state import ClientStore, Cohort, ServerState


class NormalizedAverage(ServerCallback):
    """Sets z to z − τ Σ p_i (z − w_i) / a_i with τ = Σ p_i a_i, so that many steps weigh no more than few.

    a_i is what a client's gradients have been multiplied with in all: K_i with plain SGD, and with momentum ρ
    (K_i − ρ (1 − ρ^K_i) / (1 − ρ)) / (1 − ρ). Buffers are averaged with the weights p_i. A client that took no step
    has no direction and no part: its p_i is 0.

    Args:
        by: The weights p_i: ``"samples"`` takes n_i / Σ n_j, ``"uniform"`` takes 1 / S.

    References:
        Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
        equations 8 and 9.
    """

    forms_z = True

    def __init__(self, by: Literal["samples", "uniform"] = "samples") -> None:
        self.by = by

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Note the momentum of the clients' optimizer.

        Raises:
            ConfigurationError: Their steps are not those of SGD at a constant rate, so a_i is not known.
        """
        momentum = engine.sgd_momentum
        if momentum is None:
            raise ConfigurationError(
                "algorithm: FedNova divides by the weight of a client's gradients in its update, which is known alone "
                "for SGD with or without momentum at a constant rate; take torch.optim.SGD without Nesterov and "
                "dampening, and leave out schedulers, clipping and an optimizer_step of the module's own."
            )
        self._momentum = momentum

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sums of normalised updates, of buffers, and of a_i."""
        sums.declare("normalized_update", server.z.numel())
        sums.declare("normalized_buffers", server["buffers"].numel())
        sums.declare("normalized_steps")

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the valid clients' normalised updates."""
        given = cohort.num_samples if self.by == "samples" else torch.ones(len(cohort))
        given = torch.where(cohort.num_steps > 0, given, 0.0)
        cohort.record("weight", torch.where(cohort.valid, given, 0.0))
        # Of a client without steps the weight is 0, and any factor will do.
        weights, steps = cohort.of_valid(given.double()), cohort.of_valid(cohort.num_steps).clamp(min=1)
        rho = self._momentum
        # ‖a_i‖₁ of FedNova for K steps of momentum ρ: (K − ρ (1 − ρ^K) / (1 − ρ)) / (1 − ρ); K itself for ρ = 0.
        factors = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        update = server.z - cohort.of_valid(cohort.w)
        sums.add_rows("normalized_update", update, weights / factors)
        sums.add_rows("normalized_buffers", cohort.of_valid(cohort.buffers), weights)
        sums.add("normalized_steps", (weights * factors).sum().to(sums.device, sums.dtype))

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage z and the buffers, and normalise the weights in the records so that they sum to 1."""
        total = math.fsum(record["weight"] for record in server.valid_records)
        # τ_eff Σ p_i d_i with τ_eff = Σ p_i ‖a_i‖₁: clients with many steps no longer pull z towards themselves.
        step = (sums["normalized_steps"] / total) * (sums["normalized_update"] / total)
        server.stage_model(torch.cat([server.z - step, sums["normalized_buffers"] / total]))
        for record in server.records:
            record["weight"] = record.get("weight", 0.0) / total
