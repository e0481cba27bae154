"""FedExP (Jhunjhunwala et al. 2023)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import Positive
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine
from fedbc_lightning.server import Extrapolation, RobustRule, ServerCallback, WeightedAverage
from fedbc_lightning.state import Cohort, ServerState


class FedExP(FederatedAlgorithm):
    """FedExP: FedAvg with a server step size that follows from how much the clients' updates disagree.

    Problem:
        min_w (1/N) Σ f_i(w), in fewer rounds.

    Update::

        client    Δ_i = z − w_i after E epochs from z
        server    η_s = max(1, Σ ‖Δ_i‖² / (2 S (‖Δ̄‖² + ε))),    z ← z − η_s Δ̄,    Δ̄ = mean Δ_i

    State:
        The server keeps the z of the round before, ``previous_z`` (d,).
    Communication:
        The server sends z; each client sends w_i and ‖Δ_i‖², and in the public style also n_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        ε → ∞ is FedAvg with uniform weights.
    Departures:
        ``style: public`` follows the public code: all sums have the weights p_i = n_i / Σ n_j, the denominator has
        ‖Δ̄‖² + S ε, and in every round, the first included, the clients' learning rate is multiplied by 0.998 and ε by
        0.998².

    References:
        Jhunjhunwala et al. 2023, "FedExP: Speeding Up Federated Averaging via Extrapolation", eq. 7.

    Args:
        epsilon: ε, which decides stability; the public code takes 1e-3 on CIFAR and 0.1 on EMNIST.
        style: ``"paper"`` follows the paper, ``"public"`` the public code.
        average_last_two: Whether to evaluate the mean of the last two z as the global model, as the paper does because
            z oscillates; training and the checkpoint's model take z.
        robust_rule: Robust rule by which the server aggregates the w_i; None takes the mean. η_s still takes every
            client's ‖Δ_i‖.

    Raises:
        ConfigurationError: A value is out of range, or ``style="public"`` is given with a scheduler inside clients.
    """

    def __init__(
        self,
        epsilon: Positive = 1e-3,
        style: Literal["paper", "public"] = "paper",
        average_last_two: bool = True,
        robust_rule: RobustRule | None = None,
    ) -> None:
        self.epsilon, self.style, self.average_last_two = epsilon, style, average_last_two
        self.robust_rule = robust_rule
        self.scalars_up = 2 if style == "public" else 1

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError for a scheduler in the public style, which decays the learning rate itself."""
        if self.style == "public" and engine.has_schedulers:
            raise ConfigurationError(
                "algorithm.style: 'public' lowers the learning rate from round to round, which the model's scheduler "
                "would undo; use 'paper' or leave the scheduler out."
            )

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z by default local training; the public style scales the learning rate."""
        # The official code lowers η by 0.998 in each round, which the paper does not have.
        decay = Extrapolation.DECAY**server.round if self.style == "public" else 1.0
        engine.solve(cohort, start=server.model, lr_scale=decay)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean, and then the extrapolated step."""
        weighting = "samples" if self.style == "public" else "uniform"
        return [WeightedAverage(by=weighting, rule=self.robust_rule), Extrapolation(self.epsilon, self.style)]

    def global_model(self, server: ServerState) -> Tensor:
        """Return the mean of the last two z if ``average_last_two`` is True, else z, followed by the buffers."""
        z = server.staged("z")
        # z oscillates when η_g is large; the paper evaluates the mean of two iterates, and trains from the last.
        if self.average_last_two:
            z = (z + server.staged("previous_z")) / 2
        return torch.cat([z, server.staged("buffers")])
