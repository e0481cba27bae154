"""FedRep (Collins et al. 2021) and FedBABU (Oh et al. 2022): a shared body, and heads that the clients train apart."""

from __future__ import annotations

from typing import Any

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import Count, NotNegative
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine, FineTuning
from fedbc_lightning.state import Cohort, ServerState


class _WithHead(FedAvg):
    """Base class of methods in which a part of the model, its head, stays with each client."""

    def check(self, engine: Engine) -> None:
        """Raise if all parameters are shared.

        Raises:
            ConfigurationError: ``trainer.local_parameters`` names none.
        """
        if not engine.layout.num_kept:
            raise ConfigurationError(
                f"trainer.local_parameters: {self} needs the names of the head, e.g. ['head.*']; none are given."
            )


class FedRep(_WithHead):
    """FedRep: a client first trains its own head on the frozen body, and then the body under the frozen head.

    Problem:
        min_φ Σ (n_i / n) min_{h_i} f_i(φ, h_i): one body φ for all clients, one head h_i for each.

    Update::

        client    h_i ← E_h epochs of the user's optimizer on the head alone, the body at z
                  w_i ← E epochs on the body alone, from z, under the new h_i
        server    z ← Σ p_i w_i,    p_i = n_i / Σ_{j ∈ S_t} n_j

    State:
        Each client keeps h_i ``local_parameters`` (N, p), the parameters that ``trainer.local_parameters`` names.
    Communication:
        The server sends z, the body; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is dropped, as in FedAvg.
    Local model:
        A client's own model is z with h_i.
    Degenerate cases:
        With a frozen head it is FedBABU.
    Departures:
        Algorithm 1 takes τ steps on the head and one on the body; here both are epochs, as in the authors' experiments.
        The mean is weighted by samples; ``weighting: uniform`` is the paper's.

    References:
        Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated Learning", Algorithm 1.

    Args:
        head_epochs: Number E_h of epochs of the head; the trainer's ``local_epochs`` are those of the body.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range, or ``trainer.local_parameters`` names no head.
    """

    def __init__(self, head_epochs: Count = 10, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self.head_epochs = head_epochs

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train the head, and then the body."""
        # The head first, under the body that the client has received: Algorithm 1 takes its τ steps before the one of
        # the body.
        engine.solve(cohort, server.model, trains="local", epochs=self.head_epochs, purpose="head", is_last=False)
        # The second training begins where the first ended, also in the buffers of BatchNorm.
        cohort.start_from_trained()
        engine.solve(cohort, cohort.model, trains="shared")


class FedBABU(_WithHead):
    """FedBABU: the head stays as it was initialised, only the body is trained, and both are fine-tuned for a test.

    Problem:
        min_φ Σ (n_i / n) f_i(φ, h_0) with the initial head h_0, which no client trains.

    Update::

        client        w_i ← E epochs of the user's optimizer on the body alone, from z, under the head h_0
        server        z ← Σ p_i w_i,    p_i = n_i / Σ_{j ∈ S_t} n_j
        evaluation    x ← (z, h_0);  x ← x − α g_i(x; the first samples), several times;  then test

    State:
        The head is ``local_parameters`` (N, p), the parameters that ``trainer.local_parameters`` names, which stay h_0.
    Communication:
        The server sends z, the body; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is dropped, as in FedAvg.
    Local model:
        A client's own model is (z, h_0) after the fine-tuning; nothing of that is kept.
    Degenerate cases:
        With ``finetune_lr`` 0 the global model is evaluated.
    Departures:
        All fine-tuning steps see the same first samples, at most ``finetune_batch_size`` of them; the paper takes
        epochs of mini-batches of all samples.

    References:
        Oh et al. 2022, "FedBABU: Toward Enhanced Representation for Federated Image Classification", Algorithm 1.

    Args:
        finetune_lr: Step size α of the fine-tuning.
        finetune_steps: Number of steps of the fine-tuning.
        finetune_batch_size: Number of training samples that the fine-tuning sees.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range, or ``trainer.local_parameters`` names no head.
    """

    def __init__(
        self,
        finetune_lr: NotNegative = 0.1,
        finetune_steps: Count = 20,
        finetune_batch_size: Count = 500,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        self.fine_tuning = FineTuning(finetune_lr, finetune_batch_size, "train", finetune_steps)

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train the body alone."""
        engine.solve(cohort, server.model, trains="shared")
