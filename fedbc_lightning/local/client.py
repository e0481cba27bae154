"""Protocol of what a solver may ask of the client that it trains."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedbc_lightning.core.local_training import LocalTraining


class Client(Protocol):
    """One client, or K clients with equally many steps, in the steps of a :class:`~fedbc_lightning.local.Solver`.

    Attributes:
        client: Index of the client.
        local: The local training that the trainer asks for.
        w: (K, d) iterate, which a solver writes; K = 1 unless the solver can train several clients at once.
        num_steps: Number of steps taken so far.
        num_batches: Number of batches per epoch.
    """

    client: int
    local: LocalTraining
    w: Tensor
    num_steps: int
    num_batches: int

    @property
    def rates(self) -> Tensor:
        """The user's current learning rates: (1, 1), or (1, d) if they differ between parameters."""

    @property
    def num_components(self) -> int:
        """Number m of fixed batches into which the client's data is cut."""

    def next_batch(self) -> Any:
        """Return the next batch of the client's shuffled data; a new epoch starts whenever one ends."""

    def gradient(self, w: Tensor, batch: Any) -> Tensor:
        """Return the mini-batch gradient g_i(w; batch), (K, d), including the terms."""

    def loss_and_gradient(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss at w and its gradient (K, d), both including the terms."""

    def same_draws(self) -> None:
        """Reset the random generators to this step's seed: call it before each of several comparable evaluations."""

    def trial_loss(self, w: Tensor, batch: Any) -> Tensor:
        """Return the loss at w including the terms, with the draws of :meth:`same_draws`; buffers are restored."""

    def component_gradient(self, w: Tensor, index: int) -> Tensor:
        r"""Return ∇f_ij(w), (1, d), of the fixed batch j = `index`; the plain mean over all j is ∇f_i(w)."""

    def full_gradient(self, w: Tensor) -> Tensor:
        """Return ∇f_i(w), (1, d), over all of the client's data."""

    def rng(self, purpose: str, *, of_client: bool = True) -> np.random.Generator:
        """Return a generator that depends on (seed, purpose, round), and on the client if ``of_client`` is True."""
