"""Per-FedBC: FedBC with model-agnostic local steps."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from fedbc_lightning.algorithms.fedbc import FedBC
from fedbc_lightning.core.checks import Count, NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine, FineTuning, ModelAgnostic, Proximal
from fedbc_lightning.state import Cohort, ServerState, StagedClient, StateDeclaration


class PerFedBC(FedBC):
    """Per-FedBC: FedBC for a global model that fits each client well after one step on the client's own data.

    Problem:
        min_z Σ f_i(z − α ∇f_i(z)), with FedBC's tolerances and multipliers.

    Update::

        client    from w = z, each step:  w' ← w;  J times  w' ← w' − α (g_i(w'; b_j) + 2 λ_i (w' − z))
                                          w ← w − β g_i(w'; b_{J+1})
        server    λ_i, γ_i and z as FedBC

    State:
        Each client keeps λ_i ``dual`` and γ_i ``tolerance`` (N,), and their velocities if there is momentum.
    Communication:
        The server sends z; each client sends w_i and λ_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is z after one step of size α on its data (``finetune_split``).
    Degenerate cases:
        With λ_i frozen at 0 and J = 1 it is first-order Per-FedAvg with uniform weights.
    Departures:
        The steps are plain SGD; of the model's optimizer only the weight decay of torch's SGD is used. A round has E
        times as many steps as an epoch has batches, and each step takes J + 1 new batches. The outer step has no λ
        term, as in Algorithm 3.

    References:
        "Federated Learning Beyond Consensus", Algorithm 3.

    Args:
        dual_lr: Step size α_λ of FedBC; 0 freezes λ_i.
        inner_lr: Step size α of the inner step.
        outer_lr: Step size β of the outer step.
        num_inner_steps: Number of inner steps J.
        finetune_batch_size: Number of samples, unshuffled, of the step before evaluation.
        finetune_split: Split from which these samples are taken: ``"train"``, or ``"test"`` as in the paper.
        **fedbc: The other arguments of FedBC, except ``init_from``.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(
        self,
        dual_lr: float,
        inner_lr: NotNegative = 0.01,
        outer_lr: Positive = 0.001,
        num_inner_steps: Count = 1,
        finetune_batch_size: Count = 20,
        finetune_split: Literal["train", "test"] = "train",
        **fedbc: Any,
    ) -> None:
        super().__init__(dual_lr, **fedbc)
        if self.init_from != "global":
            raise ConfigurationError("algorithm.init_from: Per-FedBC starts from z; use global.")
        self.inner_lr, self.outer_lr, self.num_inner_steps = inner_lr, outer_lr, num_inner_steps
        self.fine_tuning = FineTuning(inner_lr, finetune_batch_size, finetune_split)

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError if the trainer or the model asks for anything but plain SGD steps."""
        engine.check_solver("Per-FedBC", ModelAgnostic)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare nothing but the state of the dual ascent, since a client's own model is made from z."""

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z by model-agnostic steps, with the term of λ_i in the inner steps."""
        # The inner steps alone feel the constraint: they go from z to a personal model within γ_i of it.
        pull = Proximal(2 * self.dual_ascent.state(cohort)["dual"], server.z)
        solver = ModelAgnostic(self.inner_lr, self.outer_lr, self.num_inner_steps, inner_terms=[pull])
        engine.solve(cohort, start=server.model, solver=solver)

    def local_model(self, client: StagedClient, model: Tensor) -> Tensor:
        """Return z; the fine-tuning step is taken on it at evaluation."""
        # As in Per-FedAvg, the personal model is made of z by fine-tuning when it is evaluated.
        return model
