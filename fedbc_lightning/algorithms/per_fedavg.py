"""Per-FedAvg (Fallah et al. 2020)."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import Count, NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine, FineTuning, ModelAgnostic
from fedbc_lightning.state import Cohort, ServerState, StagedClient


class PerFedAvg(FedAvg):
    """Per-FedAvg: a global model that fits each client well after one gradient step on the client's own data.

    Problem:
        min_z (1/N) Σ f_i(z − α ∇f_i(z)).

    Update::

        client    from w = z, each step on fresh batches b1, b2 (b3):  w' = w − α g_i(w; b1),  v = g_i(w'; b2)
                  first order     w ← w − β v
                  Hessian-free    w ← w − β [v − α (g_i(w + εv; b3) − g_i(w − εv; b3)) / (2ε)],  ε = 1e-3 / max(1, ‖v‖)
        server    z ← Σ p_i w_i

    State:
        The method keeps no state.
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is z after one step of size α on its data (``finetune_split``).
    Degenerate cases:
        α = 0 is FedAvg with plain SGD of step size β, in which every second batch is not used (Hessian-free: two of
        three).
    Departures:
        The steps are plain SGD; of the model's optimizer only the weight decay of torch's SGD is used. A round has E
        times as many steps as an epoch has batches, and each step takes two (Hessian-free: three) new batches, so it
        goes through the data two (three) times as often. The two gradients on b3 see the same random numbers (dropout).

    References:
        Fallah et al. 2020, "Personalized Federated Learning: A Meta-Learning Approach", Algorithm 1, section 5.

    Args:
        inner_lr: Step size α of the inner step.
        outer_lr: Step size β of the outer step.
        variant: Form of the outer gradient: ``"first_order"`` or ``"hessian_free"``.
        finetune_batch_size: Number of samples, unshuffled, of the step before evaluation.
        finetune_split: Split from which these samples are taken: ``"train"``, or ``"test"`` as in the paper.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range.
    """

    has_local_model = True
    partial_work = "used"

    def __init__(
        self,
        inner_lr: NotNegative = 0.01,
        outer_lr: Positive = 0.001,
        variant: Literal["first_order", "hessian_free"] = "first_order",
        finetune_batch_size: Count = 20,
        finetune_split: Literal["train", "test"] = "train",
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self.solver = ModelAgnostic(inner_lr, outer_lr, hessian_free=variant == "hessian_free")
        self.fine_tuning = FineTuning(inner_lr, finetune_batch_size, finetune_split)

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError for other than plain SGD steps, or Hessian-free steps in half precision."""
        engine.check_solver("Per-FedAvg", self.solver)
        # δ = 1e-3 in (∇f(w + δv) − ∇f(w − δv)) / 2δ: bfloat16 has 8 bits, and float16 11, of which nothing is left.
        if self.solver.hessian_free and not engine.has_full_precision:
            raise ConfigurationError(
                "algorithm.variant: hessian_free divides the difference of two gradients by 2e-3, which half precision "
                "cannot tell apart; use first_order, or trainer.precision 32-true."
            )

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z by model-agnostic steps."""
        engine.solve(cohort, start=server.model, solver=self.solver)

    def local_model(self, client: StagedClient, model: Tensor) -> Tensor:
        """Return z; the fine-tuning step is taken on it at evaluation."""
        # Evaluation takes one step of α from z by `fine_tuning`, which is the point of the method.
        return model
