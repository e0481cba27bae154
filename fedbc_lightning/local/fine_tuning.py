"""Fine-tuning of a client's own model by a few steps before it is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbc_lightning.core.checks import check_at_least, check_choice


@dataclass(frozen=True)
class FineTuning:
    """Settings of the steps x ← x − α g_i(x) that are taken on each client's model x before it is evaluated.

    All steps see the client's first samples, unshuffled, and leave the buffers unchanged. The weight decay of torch's
    SGD is part of g_i, as in training.

    Attributes:
        lr: Step size α.
        batch_size: Number of samples in a step.
        split: Split from which the samples are taken: ``"train"``, or ``"test"`` as in the protocol of Per-FedAvg and
            of the FedBC paper, in which the step sees samples that are tested afterwards.
        num_steps: Number of steps.
    """

    lr: float = 0.01
    batch_size: int = 20
    split: Literal["train", "test"] = "train"
    num_steps: int = 1

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: A value is out of range.
        """
        check_at_least("algorithm.finetune_lr", self.lr, 0)
        check_at_least("algorithm.finetune_batch_size", self.batch_size, 1, whole=True)
        check_at_least("algorithm.finetune_steps", self.num_steps, 1, whole=True)
        check_choice("algorithm.finetune_split", self.split, ("train", "test"))
