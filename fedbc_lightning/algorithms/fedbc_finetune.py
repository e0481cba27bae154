"""FedBC-FineTune: FedBC with one step of fine-tuning at evaluation."""

from __future__ import annotations

from typing import Any, Literal

from fedbc_lightning.algorithms.fedbc import FedBC
from fedbc_lightning.local import FineTuning


class FedBCFineTune(FedBC):
    """FedBC-FineTune: FedBC whose clients take one more step before their own model is tested.

    Problem:
        As FedBC; the local models are then tested as Per-FedAvg's are.

    Update::

        training      as FedBC
        evaluation    x_i ← x_i − α g_i(x_i; the first 20 samples, unshuffled);  then test

    State:
        As FedBC.
    Communication:
        As FedBC.
    Partial work:
        Used.
    Local model:
        x_i after that step. What is stored stays x_i.
    Degenerate cases:
        ``finetune_lr`` 0 is FedBC.
    Departures:
        The paper takes the batch from the client's *test* data (``finetune_split: test``), so that the step sees what
        is then tested; the default here takes it from the training data. The weight decay of torch's SGD is part of it.

    References:
        "Federated Learning Beyond Consensus", section 5.

    Args:
        dual_lr: α_λ of FedBC.
        finetune_lr: α of the step.
        finetune_batch_size: Its samples.
        finetune_split: Where they are taken from: ``"train"``, or ``"test"``: the paper's protocol.
        **fedbc: The other arguments of FedBC.

    Raises:
        ConfigurationError: A value outside its range.
    """

    def __init__(
        self,
        dual_lr: float,
        finetune_lr: float = 0.01,
        finetune_batch_size: int = 20,
        finetune_split: Literal["train", "test"] = "train",
        **fedbc: Any,
    ) -> None:
        super().__init__(dual_lr, **fedbc)
        self.fine_tuning = FineTuning(finetune_lr, finetune_batch_size, finetune_split)
