"""Fine-tuning of a client's own model by one step before it is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbc_lightning.core.checks import check_at_least, check_choice


@dataclass(frozen=True)
class FineTuning:
    """Settings of the step x ← x − α g_i(x) that is taken on each client's model x before it is evaluated.

    The step sees the client's first samples, unshuffled, and leaves the buffers unchanged. The weight decay of torch's
    SGD is part of g_i, as in training.

    Attributes:
        lr: Step size α.
        batch_size: Number of samples in the step.
        split: Split from which the samples are taken: ``"train"``, or ``"test"`` as in the protocol of Per-FedAvg and
            of the FedBC paper, in which the step sees samples that are tested afterwards.
    """

    lr: float = 0.01
    batch_size: int = 20
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: A value is out of range.
        """
        check_at_least("algorithm.finetune_lr", self.lr, 0)
        check_at_least("algorithm.finetune_batch_size", self.batch_size, 1, whole=True)
        check_choice("algorithm.finetune_split", self.split, ("train", "test"))
