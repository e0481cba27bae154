"""Means: how the server forms z and the buffers from the clients' models."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.server.robust import RobustRule
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration

# How much a client's model counts in a mean: by its number of samples, or as much as every other one
Weighting = Literal["samples", "uniform"]


class WeightedAverage(ServerCallback):
    """Sets z to the weighted mean z ← Σ_{S_t} a_j w_j / Σ_{S_t} a_j, or to the result of a robust rule.

    The buffers are aggregated in the same way.

    Args:
        by: The weights a_j: ``"samples"`` takes n_j (FedAvg), ``"uniform"`` takes 1, and the name of a declared client
            scalar takes its value, e.g. ``"dual"`` (FedBC, eq. 13, with the *new* λ_j). If all weights of a round are
            0, each of them is set to 1.
        rule: Robust rule that aggregates the updates w_j − z with these weights in place of the mean, e.g.
            :class:`~fedbc_lightning.server.CoordinateMedian`; None takes the mean.
    """

    forms_z = True

    def __init__(self, by: Weighting | str = "samples", rule: RobustRule | None = None) -> None:
        self.by, self.rule = by, rule
        self.reads = () if by in ("samples", "uniform") else (by,)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare the state of the robust rule, if there is one."""
        if self.rule is not None:
            self.rule.declare_state(state)

    def check(self, engine: Engine, num_sampled: int) -> None:
        """Raise a ConfigurationError if the robust rule cannot work with S clients."""
        if self.rule is not None:
            self.rule.check(num_sampled)

    def weights(self, cohort: Cohort) -> Tensor:
        """Return the weights a_j of the cohort's clients, (K,); invalid clients have weight 0."""
        if self.by == "samples":
            weights = cohort.num_samples
        elif self.by == "uniform":
            weights = torch.ones(len(cohort))
        else:
            weights = cohort.staged(self.by)
        return weights if cohort.is_all_valid else torch.where(cohort.valid, weights, 0.0)

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the valid clients' models to the sums, or keep them for the robust rule."""
        weights = self.weights(cohort)
        cohort.record("weight", weights)
        model, weights = cohort.of_valid(cohort.model), cohort.of_valid(weights)
        if self.rule is not None:
            for position, row in zip(cohort.valid_positions, model, strict=True):
                sums.keep("model", position, row)
            return
        sums.add_rows("weighted_model", model, weights)
        # With λ as weights all may be 0 (dual_min = 0). Whether they are is known after the last cohort only, so both
        # sums are taken; the second becomes the mean of such a round.
        if self.reads and not weights.all():
            sums.add_rows("unweighted_model", model, (weights == 0).double())

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Stage z and the buffers, and normalise the weights in the records so that they sum to 1."""
        is_weighted = any(record["weight"] > 0 for record in server.valid_records)
        if not is_weighted:
            for record in server.valid_records:
                record["weight"] = 1.0
        # fsum: the total does not depend on the order of clients, and so not on the number of processes.
        total = math.fsum(record["weight"] for record in server.valid_records)
        if self.rule is None:
            # In place: no vector of a round is larger, and this part alone reads it.
            server.stage_model(sums["weighted_model" if is_weighted else "unweighted_model"].div_(total))
        else:
            updates, buffers = sums.rows("model").tensor_split([server.z.numel()], dim=1)
            weights = torch.tensor([record["weight"] for record in server.valid_records], dtype=torch.float64)
            updates -= server.z
            step, buffers = self.rule.aggregate(updates, weights, buffers, server)
            server.stage_model(torch.cat([server.z + step, buffers]))
        for record in server.records:
            record["weight"] = record.get("weight", 0.0) / total


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

    def __init__(self, by: Weighting = "samples") -> None:
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
                "dampening, and leave out schedulers, clipping, manual optimization and an own optimizer_step."
            )
        self._momentum = momentum

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
        sums.add_rows("normalized_update", server.z - cohort.of_valid(cohort.w), weights / factors)
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


class AveragedBuffers(ServerCallback):
    """Averages the clients' buffers, weighted by their samples, if z was staged and the buffers were not.

    A part that stages z only would otherwise leave BatchNorm with the mean 0 and the variance 1 of its initialisation.
    The federation adds this part after the algorithm's own parts.
    """

    _mean: Tensor | None = None

    def on_cohort_end(self, cohort: Cohort, server: ServerState, sums: Sums) -> None:
        """Add the valid clients' buffers."""
        # By samples, whatever weights z has: statistics of a batch are estimates whose variance falls with their
        # number.
        weights = cohort.of_valid(cohort.num_samples)
        sums.add_rows("own_buffers", cohort.of_valid(cohort.buffers), weights)
        sums.add("own_buffers_weight", weights.sum().to(sums.device, sums.dtype))

    def on_round_end(self, server: ServerState, clients: ClientStore) -> None:
        """Stage the mean, if nobody has staged buffers for this z."""
        mean, self._mean = self._mean, None  # it does not outlive the round
        if mean is not None and server.is_staged("z") and not server.is_staged("buffers"):
            server.stage("buffers", mean)

    def on_aggregate(self, server: ServerState, clients: ClientStore, sums: Sums) -> None:
        """Compute the mean, which :meth:`on_round_end` stages if it is needed."""
        if "own_buffers" in sums.totals:  # nobody may have started in a round of an asynchronous method
            self._mean = sums["own_buffers"] / sums["own_buffers_weight"]
