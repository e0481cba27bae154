"""Per-FedBC: FedBC with model-agnostic local steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from fedbc_lightning.algorithms.fedbc import FedBC
from fedbc_lightning.core.checks import check_at_least
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import FineTuning, ModelAgnostic, Proximal
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState, StagedClient, StateDeclaration

if TYPE_CHECKING:
    from fedbc_lightning.local.engine import Engine


class PerFedBC(FedBC):
    """Per-FedBC: FedBC for a global model that is good after one step of each client's own.

    Problem:
        min_z Σ f_i(z − α ∇f_i(z)), with FedBC's tolerances and multipliers.

    Update::

        client    from w = z, each step:  w' ← w;  J times  w' ← w' − α (g_i(w'; b_j) + 2 λ_i (w' − z))
                                          w ← w − β g_i(w'; b_{J+1})
        server    λ_i, γ_i and z as FedBC

    State:
        λ_i ``dual`` and γ_i ``tolerance`` (N,); with momentum their velocities.
    Communication:
        z down; w_i and λ_i up.
    Partial work:
        Used.
    Local model:
        z after one step of α on the client's data (``finetune_split``).
    Degenerate cases:
        λ_i frozen at 0, J = 1: Per-FedAvg (first-order) with uniform weights.
    Departures:
        Plain SGD steps: of the model's optimizer nothing is used, but for the weight decay of torch's SGD. Each step
        takes J + 1 fresh batches, E x batches per epoch of them; no λ term in the outer step, as Algorithm 3 has it.

    References:
        "Federated Learning Beyond Consensus", Algorithm 3.

    Args:
        dual_lr: α_λ of FedBC.
        inner_lr: α.
        outer_lr: β.
        num_inner_steps: J.
        finetune_batch_size: Samples of the step before evaluation, unshuffled.
        finetune_split: Where they are taken from: ``"train"``, or ``"test"``: the paper's protocol.
        **fedbc: The other arguments of FedBC but ``init_from``.

    Raises:
        ConfigurationError: A value outside its range.
    """

    def __init__(
        self,
        dual_lr: float,
        inner_lr: float = 0.01,
        outer_lr: float = 0.001,
        num_inner_steps: int = 1,
        finetune_batch_size: int = 20,
        finetune_split: Literal["train", "test"] = "train",
        **fedbc: Any,
    ) -> None:
        super().__init__(dual_lr, **fedbc)
        if self.init_from != "global":
            raise ConfigurationError("algorithm.init_from: Per-FedBC starts from z; use global.")
        check_at_least("algorithm.inner_lr", inner_lr, 0)
        check_at_least("algorithm.outer_lr", outer_lr, 0, strict=True)
        check_at_least("algorithm.num_inner_steps", num_inner_steps, 1, whole=True)
        self.inner_lr, self.outer_lr, self.num_inner_steps = inner_lr, outer_lr, num_inner_steps
        self.fine_tuning = FineTuning(inner_lr, finetune_batch_size, finetune_split)

    def check(self, engine: Engine) -> None:
        """Plain steps."""
        engine.check_solver("Per-FedBC", ModelAgnostic)

    def declare_state(self, state: StateDeclaration) -> None:
        """Nothing beside the duals: a client's own model is made from z."""

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Model-agnostic steps from z, λ_i in the inner ones."""
        pull = Proximal(2 * self.dual_ascent.state(cohort)["dual"], server.z)
        solver = ModelAgnostic(self.inner_lr, self.outer_lr, self.num_inner_steps, inner_terms=[pull])
        engine.solve(cohort, start=server.model, solver=solver)

    def local_model(self, client: StagedClient, model: Tensor) -> Tensor:
        """Z, before its step."""
        return model
