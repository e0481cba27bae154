"""Protocol of what a method may ask of the engine that trains its clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.local.contrast import ModelContrast
from fedbc_lightning.local.solvers import Solver
from fedbc_lightning.local.terms import AfterStep, Term
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.layout import ParameterLayout

Trains = Literal["all", "shared", "local"]
"""Part of the model that a local training moves."""


class Engine(Protocol):
    """Trains cohorts of clients. Algorithms and server parts use this protocol only, so any engine can run them.

    Attributes:
        layout: The layout of the module's parameters in a vector (d,).
        datamodule: The data module with the clients' data.
        has_full_precision: Whether losses and gradients are computed in float32 or float64 throughout.
        has_schedulers: Whether the module's learning rates follow schedulers within local training.
    """

    layout: ParameterLayout
    datamodule: FederatedDataModule
    has_full_precision: bool
    has_schedulers: bool

    @property
    def is_plain_sgd(self) -> bool:
        """Whether every local step is exactly ``w -= lr * grad``; hooks may not change it then."""

    @property
    def sgd_momentum(self) -> float | None:
        """Momentum of SGD's steps (without Nesterov) at constant rates, else None; hooks may not change it then."""

    def check_solver(self, name: str, solver: Solver | type[Solver]) -> None:
        """Raise for settings that a solver's own steps ignore; a method with a solver calls this in its ``check``.

        Args:
            name: Name of the method, for error messages.
            solver: The solver, or its class.

        Raises:
            ConfigurationError: The trainer or the module asks for something that the solver does not do.
        """

    def check_losses(self, name: str) -> None:
        """Raise if ``training_step`` does more than return a loss; a method that calls ``train_loss`` checks this.

        Args:
            name: Name of the method, for error messages.

        Raises:
            ConfigurationError: The module uses manual optimization.
        """

    def check_layer(self, name: str, layer: str) -> None:
        """Raise if the output of a layer cannot be read; a method with a ModelContrast calls this in its ``check``.

        Args:
            name: Name of the method, for error messages.
            layer: Name of the layer, as in ``named_modules``.

        Raises:
            ConfigurationError: The module has no such layer, or this engine cannot read it.
        """

    def solve(
        self,
        cohort: Cohort,
        start: Tensor,
        terms: Sequence[Term] = (),
        *,
        solver: Solver | None = None,
        after_step: AfterStep | None = None,
        contrast: ModelContrast | None = None,
        epochs: int | None = None,
        lr_scale: float = 1.0,
        record_gradient_mean: bool = False,
        purpose: str = "client",
        is_last: bool = True,
        trains: Trains = "all",
    ) -> None:
        """Train the cohort from ``start``, by default local training or by a solver's own steps.

        This fills in the cohort's ``w``, ``buffers``, ``num_steps``, ``step_size``, ``losses``, ``valid`` and
        records. A second call trains the same clients once more, and its results replace those of the first.

        Args:
            cohort: The clients.
            start: The model at which training starts, (d + b,) or (K, d + b).
            terms: Terms that the method adds to the loss; their gradients are added in every step.
            solver: Solver whose steps replace those of the user's optimizer.
            after_step: Change that is applied to w after every step of the user's optimizer.
            contrast: Model-contrastive term that is added to the loss of each batch.
            epochs: Number of epochs E of this training, in place of the trainer's; stragglers train a part of them.
            lr_scale: Factor on the user's learning rates.
            record_gradient_mean: Whether to fill in ``cohort.gradient_mean``, the mean raw gradient over the steps.
            purpose: Name that seeds the random draws inside ``training_step``; give a second training another name.
            is_last: Whether no other training of the same clients follows in this round.
            trains: Part of the model that this training moves: ``"all"``, the ``"shared"`` parameters or the clients'
                own, ``"local"`` (``trainer.local_parameters``). The other part has no gradient and stays as it is.
        """

    def train_loss(self, cohort: Cohort, model: Tensor) -> Tensor:
        """Return each client's mean training loss f_i, (K,), of a model (d + b,) in evaluation mode."""

    def component_shares(self, client: int) -> list[float]:
        """Return the fractions of the client's samples that lie in each of its fixed batches; they sum to 1."""
