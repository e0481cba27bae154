"""What a method may ask of the engine that trains its clients, and a solver of the client that it trains."""

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
    """Trains cohorts of clients. Algorithms and server parts are written against this, so that any engine runs them.

    Attributes:
        layout: How the module's parameters lie in a vector (d,).
        datamodule: The clients' data.
    """

    layout: ParameterLayout
    datamodule: FederatedDataModule

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
        """Refuse what a solver's own steps cannot honour; a method with a solver calls this in its ``check``.

        Args:
            name: Name of the method, for messages.
            solver: The solver, or its class.

        Raises:
            ConfigurationError: The trainer or the module asks for something that the solver leaves out.
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
        """Train the cohort from ``start``: default local training, or a solver's own steps.

        Fills in the cohort's ``w``, ``buffers``, ``num_steps``, ``step_size``, ``batch_loss``, ``valid`` and records. A
        second call for the same cohort is another training of the same clients; its results replace the first's.

        Args:
            cohort: The clients.
            start: A model, (d + b,) or (K, d + b).
            terms: What the method adds to the loss; added to every step's gradient.
            solver: Steps of the method's own, in place of the user's optimizer.
            after_step: Applied to w after every step of the user's optimizer.
            epochs: E for this training in place of the trainer's; a straggler does its share of them.
            lr_scale: Factor on the user's learning rates.
            record_gradient_mean: Also fill in ``cohort.gradient_mean``, the mean raw gradient over the steps.
            purpose: What the random draws inside ``training_step`` are for; another one for a second training.
            is_last: Whether no other training of the same clients follows in this round.
        """

    def train_loss(self, cohort: Cohort, model: Tensor) -> Tensor:
        """Return f_i (K,) of a model (d + b,): each client's mean training loss, in evaluation mode."""

    def component_shares(self, client: int) -> list[float]:
        """Return the share of the client's samples that lies in each of its fixed batches; they sum to 1."""


class Client(Protocol):
    """One client, or K clients with as many steps each, during the steps of a :class:`~fedbc_lightning.local.Solver`.

    Attributes:
        client: Index of the client.
        local: What the trainer asks of local training.
        w: (K, d) the iterate, which a solver writes; K = 1 but for the solvers that train several clients at once.
        num_steps: Steps taken so far.
        num_batches: Batches per epoch.
    """

    client: int
    local: LocalTraining
    w: Tensor
    num_steps: int
    num_batches: int

    @property
    def rates(self) -> Tensor:
        """The user's current learning rates, (1, 1) or (1, d) by parameter."""

    @property
    def num_components(self) -> int:
        """m, the number of fixed batches into which the client's data is cut."""

    def next_batch(self) -> Any:
        """Return the next batch of the client's shuffled epochs, which follow one another without end."""

    def gradient(self, w: Tensor, batch: Any) -> Tensor:
        """Return g_i(w; batch), (K, d), the terms included."""

    def loss_and_gradient(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss at w and its gradient (K, d), the terms included."""

    def same_draws(self) -> None:
        """Seed the generators for this step: evaluations that each follow a call see the same random numbers."""

    def trial_loss(self, w: Tensor, batch: Any) -> Tensor:
        """Return the loss at w with the draws of :meth:`same_draws`, the terms included; buffers are put back."""

    def component_gradient(self, w: Tensor, index: int) -> Tensor:
        r"""Return ∇f_ij(w), (1, d), of fixed batch j, scaled so that the plain mean over j is ∇f_i(w)."""

    def full_gradient(self, w: Tensor) -> Tensor:
        """Return ∇f_i(w), (1, d), over all of the client's data."""

    def rng(self, purpose: str, *, of_client: bool = True) -> np.random.Generator:
        """Return a generator that depends on (seed, purpose, round) and, if wanted, the client."""
