"""Aggregation rules: how the server forms z from the clients' models."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedbc_lightning.local import Engine
from fedbc_lightning.server.base import ServerCallback, Sums
from fedbc_lightning.server.robust import RobustRule
from fedbc_lightning.state import ClientStore, Cohort, ServerState, StateDeclaration


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

    def __init__(self, by: Literal["samples", "uniform"] | str = "samples", rule: RobustRule | None = None) -> None:
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

    def on_round_start(self, server: ServerState, sums: Sums) -> None:
        """Declare the sum of the weighted models; if weights can be 0, also that of the models of weight 0.

        The second sum becomes the mean in a round in which all weights are 0.
        """
        # With λ as weights all may be 0 (dual_min = 0). Whether they are is known after the last cohort only, so both
        # sums are taken.
        if self.rule is None:
            for group in ("weighted", "unweighted") if self.reads else ("weighted",):
                sums.declare(f"{group}_model", server.model.numel())

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
        if self.reads:
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
            server.stage_model(sums["weighted_model" if is_weighted else "unweighted_model"] / total)
        else:
            models = sums.rows("model")
            updates, buffers = models.split([server.z.numel(), models.shape[1] - server.z.numel()], dim=1)
            weights = torch.tensor([record["weight"] for record in server.valid_records], dtype=torch.float64)
            updates -= server.z
            step, buffers = self.rule.aggregate(updates, weights, buffers, server)
            server.stage_model(torch.cat([server.z + step, buffers]))
        for record in server.records:
            record["weight"] = record.get("weight", 0.0) / total
