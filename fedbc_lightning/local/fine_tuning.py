"""Fine-tuning of a client's own model by a few steps before it is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbc_lightning.core.checks import Count, NotNegative, checked


@checked("algorithm: FineTuning")
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

    Raises:
        ConfigurationError: A value is out of range.
    """

    lr: NotNegative = 0.01
    batch_size: Count = 20
    split: Literal["train", "test"] = "train"
    num_steps: Count = 1
