"""What every client does in a round: how long it trains, and how its gradients are clipped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

RecordSteps = Literal["auto"] | bool


@dataclass(frozen=True)
class LocalTraining:
    """What every client does in a round; names as in Lightning's Trainer.

    Attributes:
        epochs: E local epochs, or None.
        steps: Exactly this many optimizer steps instead, over as many passes as that takes.
        accumulate_grad_batches: Batches per optimizer step.
        gradient_clip_val: Clip after the algorithm's terms were added; None: not at all.
        gradient_clip_algorithm: By ``"norm"`` over all parameters at once, or by ``"value"``.
        record_steps: Which steps are recorded: ``"auto"`` those that are proven to be functions of weights and batch;
            True all, the user vouches for them; False none.
        schedule_rounds: T, where a client's epochs and steps go on over all rounds; None: they begin anew in each.
    """

    epochs: int | None = 1
    steps: int | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    record_steps: RecordSteps = "auto"
    schedule_rounds: int | None = None

    def num_steps(self, num_batches: int) -> int:
        """K_i, the optimizer steps of a client with so many batches, if no step is skipped."""
        if self.steps is not None:
            return self.steps
        return -(-num_batches // self.accumulate_grad_batches) * (self.epochs or 0)

    def limits(self, num_batches: int) -> dict[str, int]:
        """How far local training goes, by Lightning's names, for a client with so many batches.

        Where its epochs and steps go on over the rounds, that is what it takes if it takes part in all of them.
        """
        rounds, steps_per_epoch = self.schedule_rounds or 1, -(-num_batches // self.accumulate_grad_batches)
        planned = self.num_steps(num_batches) * rounds
        return {
            "max_epochs": self.epochs * rounds if self.epochs is not None else -(-planned // steps_per_epoch),
            "max_steps": self.steps * rounds if self.steps is not None else -1,
            "estimated_stepping_batches": planned,
        }

    def clip(self, gradients: Tensor) -> None:
        """Clip one client's gradient (d,), or those of K clients (K, d), in place."""
        value = self.gradient_clip_val
        if not value:
            return
        if self.gradient_clip_algorithm == "value":
            gradients.clamp_(-value, value)
        else:
            norms = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
            gradients.mul_((value / (norms + 1e-6)).clamp(max=1.0))

    def shortened(self, num_batches: int, rng: np.random.Generator) -> LocalTraining:
        """What a straggler does: fewer epochs, drawn from 1..E-1; with E = 1, or counted in steps, fewer steps."""
        if self.epochs is not None and self.epochs > 1:
            return replace(self, epochs=int(rng.integers(1, self.epochs)))
        steps = self.num_steps(num_batches)
        return replace(self, epochs=None, steps=int(rng.integers(1, steps)) if steps > 1 else 1)
