"""Protocols of what a method may ask of the engine that trains its clients, and a solver of the client it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.layout import ParameterLayout

if TYPE_CHECKING:
    from fedbc_lightning.data import FederatedDataModule
    from fedbc_lightning.local.after_step import AfterStep
    from fedbc_lightning.local.solvers import Solver
    from fedbc_lightning.local.terms import Term


class Engine(Protocol):
    """Trains cohorts of clients. Algorithms and server parts use this protocol only, so any engine can run them."""

    @property
    def layout(self) -> ParameterLayout:
        """The layout of the module's parameters in a vector (d,)."""

    @property
    def datamodule(self) -> FederatedDataModule:
        """The data module with the clients' data."""

    @property
    def is_plain_sgd(self) -> bool:
        """Whether every local step is exactly ``w -= lr * grad``."""

    @property
    def has_full_precision(self) -> bool:
        """Whether losses and gradients are computed in float32 or float64 throughout."""

    @property
    def has_schedulers(self) -> bool:
        """Whether the module's learning rates follow schedulers within local training."""

    def check_solver(self, name: str, solver: Solver | type[Solver]) -> None:
        """Raise for settings that a solver's own steps ignore; a method with a solver calls this in its ``check``.

        Args:
            name: Name of the method, for error messages.
            solver: The solver, or its class.

        Raises:
            ConfigurationError: The trainer or the module asks for something that the solver does not do.
        """

    def solve(
        self,
        cohort: Cohort,
        start: Tensor,
        terms: Sequence[Term] = (),
        *,
        solver: Solver | None = None,
        after_step: AfterStep | None = None,
        epochs: int | None = None,
        lr_scale: float = 1.0,
        record_gradient_mean: bool = False,
        purpose: str = "client",
        is_last: bool = True,
    ) -> None:
        """Train the cohort from ``start``, by default local training or by a solver's own steps.

        This fills in the cohort's ``w``, ``buffers``, ``num_steps``, ``step_size``, ``batch_loss``, ``valid`` and
        records. A second call trains the same clients once more, and its results replace those of the first.

        Args:
            cohort: The clients.
            start: The model at which training starts, (d + b,) or (K, d + b).
            terms: Terms that the method adds to the loss; their gradients are added in every step.
            solver: Solver whose steps replace those of the user's optimizer.
            after_step: Change that is applied to w after every step of the user's optimizer.
            epochs: Number of epochs E of this training, in place of the trainer's; stragglers train a part of them.
            lr_scale: Factor on the user's learning rates.
            record_gradient_mean: Whether to fill in ``cohort.gradient_mean``, the mean raw gradient over the steps.
            purpose: Name that seeds the random draws inside ``training_step``; give a second training another name.
            is_last: Whether no other training of the same clients follows in this round.
        """

    def train_loss(self, cohort: Cohort, model: Tensor) -> Tensor:
        """Return each client's mean training loss f_i, (K,), of a model (d + b,) in evaluation mode."""

    def component_shares(self, client: int) -> list[float]:
        """Return the fractions of the client's samples that lie in each of its fixed batches; they sum to 1."""


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
