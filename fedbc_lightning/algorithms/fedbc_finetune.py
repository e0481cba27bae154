"""FedBC-FineTune: FedBC with one step of fine-tuning at evaluation."""

from __future__ import annotations

from typing import Any, Literal

from fedbc_lightning.algorithms.fedbc import FedBC
from fedbc_lightning.core.checks import Count, NotNegative
from fedbc_lightning.local import FineTuning


class FedBCFineTune(FedBC):
    """FedBC-FineTune: FedBC whose clients take one more step before their own model is tested.

    Problem:
        The problem is FedBC's; the local models are fine-tuned before a test, as in Per-FedAvg.

    Update::

        training      as FedBC
        evaluation    x_i ← x_i − α g_i(x_i; the first 20 samples, unshuffled);  then test

    State:
        The state is FedBC's.
    Communication:
        The server sends z; each client sends w_i and λ_i, as in FedBC.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is x_i after the fine-tuning step; the stored x_i stays as it is.
    Degenerate cases:
        With ``finetune_lr`` 0 it is FedBC.
    Departures:
        The paper takes the batch from the client's *test* data (``finetune_split: test``), so the step sees samples
        that are then tested; the default here takes it from the training data. The weight decay of torch's SGD is part
        of the step.

    References:
        "Federated Learning Beyond Consensus", section 5.

    Args:
        dual_lr: Step size α_λ of FedBC; 0 freezes λ_i.
        finetune_lr: Step size α of the fine-tuning step.
        finetune_batch_size: Number of samples of the fine-tuning step.
        finetune_split: Split from which these samples are taken: ``"train"``, or ``"test"`` as in the paper.
        **fedbc: The other arguments of FedBC.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(
        self,
        dual_lr: float,
        finetune_lr: NotNegative = 0.01,
        finetune_batch_size: Count = 20,
        finetune_split: Literal["train", "test"] = "train",
        **fedbc: Any,
    ) -> None:
        super().__init__(dual_lr, **fedbc)
        self.fine_tuning = FineTuning(finetune_lr, finetune_batch_size, finetune_split)
