"""The local steps of loopless local gradient descent (L2GD and its stochastic and variance-reduced forms)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedbc_lightning.local.solvers import Client, Solver


class LooplessSteps(Solver):
    """Takes the local steps x ← x − α G between two exchanges, one for each 0 that the coin of L2GD shows.

    j is the component that is drawn in a step, and a table is written from the x before the step::

        L2GD      G = ∇f_i / (N(1 − p))
        L2SGD     G = ∇f_ij / (N(1 − p))
        L2SGD2    G = ∇f_ij / (N(1 − p)) + Ψ_i / N
        L2SGD+    G = (∇f_ij − J_ij) / (N(1 − p)) + J̄_i / N + Ψ_i / N;    J_ij ← ∇f_ij
        L2SGD++   as L2SGD+, with the first summand times N/S if the client is sampled in this step, and 0 otherwise

    Args:
        num_local_steps: Number of local steps.
        lr: Step size α.
        probability: Probability p of an exchange.
        clients: Numbers of the N clients that train.
        offset: Shift Ψ_i, (K, d), or 0.
        is_stochastic: Whether to draw a component j and take ∇f_ij; otherwise ∇f_i is taken.
        table: Table J_i, (K, m, d), which is written in place, or None for methods without one.
        num_sampled: Number S of clients sampled in each step of L2SGD++; None takes all clients in every step.
    """

    one_by_one = "each client cuts its data into a number of components of its own, which it draws by itself"

    def __init__(
        self,
        num_local_steps: int,
        lr: float,
        probability: float,
        clients: np.ndarray,
        offset: Tensor | float = 0.0,
        is_stochastic: bool = False,
        table: Tensor | None = None,
        num_sampled: int | None = None,
    ) -> None:
        self.num_local_steps, self.lr, self.probability = num_local_steps, lr, probability
        self.clients, self.num_clients = clients, len(clients)
        self.offset, self.is_stochastic, self.table, self.num_sampled = offset, is_stochastic, table, num_sampled
        self.mean: Tensor | float = 0.0

    def num_steps(self, client: Client) -> int:
        """Return the number of local steps that the coin has drawn."""
        return self.num_local_steps

    def begin(self, client: Client) -> None:
        """Draw the steps in which the client is sampled, and compute the mean J̄_i of the table."""
        # Participants are drawn without the client's number in the seed: every client must find the same ones.
        self.components = client.rng("component")
        self.is_sampled = np.ones(self.num_local_steps, dtype=bool)
        if self.num_sampled is not None:
            rng = client.rng("participants", of_client=False)
            drawn = [rng.choice(self.clients, self.num_sampled, replace=False) for _ in self.is_sampled]
            self.is_sampled = np.array([client.client in chosen for chosen in drawn])
        if self.table is not None:
            self.mean = self.table.mean(dim=1)

    def step(self, client: Client) -> None:
        """Take one local step; the table is not changed in a step in which the client is not sampled."""
        direction = self.offset + self.mean
        if self.is_sampled[client.num_steps]:
            # All clients draw the same participants (see begin), so that exactly S of them take part in each step.
            share = 1.0 if self.num_sampled is None else self.num_clients / self.num_sampled
            direction = direction + share / (1 - self.probability) * self._innovation(client)
        client.w -= self.lr / self.num_clients * direction

    def _innovation(self, client: Client) -> Tensor:
        """Return ∇f_i, ∇f_ij, or ∇f_ij − J_ij; in the last case, write ∇f_ij into the table."""
        if not self.is_stochastic:
            return client.full_gradient(client.w)
        component = int(self.components.integers(client.num_components))
        gradient = client.component_gradient(client.w, component)
        if self.table is None:
            return gradient
        # SAGA's control variate: E_j[∇f_ij − J_ij] + J̄_i = ∇f_i, and its variance vanishes as J approaches ∇f_ij.
        difference = gradient - self.table[:, component]
        self.table[:, component] = gradient
        # J̄_i is kept up to date in O(d) per step, where a new mean of the table would cost O(m d).
        self.mean = self.mean + difference / self.table.shape[1]
        return difference
