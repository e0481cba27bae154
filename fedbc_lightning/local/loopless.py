"""The local steps of loopless local gradient descent (L2GD and its stochastic and variance-reduced forms)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fedbc_lightning.local.solvers import Solver

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Client


class LooplessSteps(Solver):
    """A run of zeros of the coin.

    Each one is x ← x − α G, with j a drawn component and tables written from x before the step::

        L2GD      G = ∇f_i / (N(1 − p))
        L2SGD     G = ∇f_ij / (N(1 − p))
        L2SGD2    G = ∇f_ij / (N(1 − p)) + Ψ_i / N
        L2SGD+    G = (∇f_ij − J_ij) / (N(1 − p)) + J̄_i / N + Ψ_i / N;    J_ij ← ∇f_ij
        L2SGD++   as L2SGD+, the first summand times N/S in the steps in which the client is sampled, else without it

    Args:
        num_local_steps: How many.
        lr: α.
        probability: p.
        num_clients: N.
        offset: Ψ_i, (K, d), or 0.
        is_stochastic: Whether a component is drawn, or ∇f_i taken.
        table: J_i, (K, m, d), or None; written in place.
        num_sampled: S of L2SGD++; None: all in every step.
    """

    one_by_one = "each client cuts its data into a number of components of its own, which it draws by itself"

    def __init__(
        self,
        num_local_steps: int,
        lr: float,
        probability: float,
        num_clients: int,
        offset: Tensor | float = 0.0,
        is_stochastic: bool = False,
        table: Tensor | None = None,
        num_sampled: int | None = None,
    ) -> None:
        self.num_local_steps, self.lr, self.probability, self.num_clients = (
            num_local_steps, lr, probability, num_clients,
        )  # fmt: skip
        self.offset, self.is_stochastic, self.table, self.num_sampled = offset, is_stochastic, table, num_sampled
        self.mean: Tensor | float = 0.0

    def num_steps(self, client: Client) -> int:
        """As drawn."""
        return self.num_local_steps

    def begin(self, client: Client) -> None:
        """Who is sampled in which step; J̄_i."""
        self.components = client.rng("component")
        self.is_sampled = np.ones(self.num_local_steps, dtype=bool)
        if self.num_sampled is not None:
            rng = client.rng("participants", of_client=False)
            drawn = [rng.choice(self.num_clients, self.num_sampled, replace=False) for _ in self.is_sampled]
            self.is_sampled = np.array([client.client in chosen for chosen in drawn])
        if self.table is not None:
            self.mean = self.table.mean(dim=1)

    def step(self, client: Client) -> None:
        """One zero of the coin."""
        direction = self.offset + self.mean
        if self.is_sampled[client.num_steps]:
            share = 1.0 if self.num_sampled is None else self.num_clients / self.num_sampled
            direction = direction + share / (1 - self.probability) * self._innovation(client)
        client.w -= self.lr / self.num_clients * direction

    def _innovation(self, client: Client) -> Tensor:
        """∇f_i, ∇f_ij, or ∇f_ij − J_ij, after which the table holds ∇f_ij."""
        if not self.is_stochastic:
            return client.full_gradient(client.w)
        component = int(self.components.integers(client.num_components))
        gradient = client.component_gradient(client.w, component)
        if self.table is None:
            return gradient
        difference = gradient - self.table[:, component]
        self.table[:, component] = gradient
        self.mean = self.mean + difference / self.table.shape[1]
        return difference
