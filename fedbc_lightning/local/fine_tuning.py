"""One step of fine-tuning before a client's own model is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbc_lightning.core.checks import check_at_least, check_choice


@dataclass(frozen=True)
class FineTuning:
    """At evaluation: x ← x − α g_i(x) on the first samples of the client, unshuffled, buffers unchanged; then test.

    The weight decay of torch's SGD is part of g_i, as in training.

    Attributes:
        lr: α.
        batch_size: How many samples.
        split: ``"train"``, or ``"test"``: the protocol of Per-FedAvg and of the FedBC paper, in which the step sees
            samples that are then tested.
    """

    lr: float = 0.01
    batch_size: int = 20
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        """Check."""
        check_at_least("algorithm.finetune_lr", self.lr, 0)
        check_at_least("algorithm.finetune_batch_size", self.batch_size, 1, whole=True)
        check_choice("algorithm.finetune_split", self.split, ("train", "test"))
