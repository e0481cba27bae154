"""Settings of local training, equal for all clients: how long a client trains, and how its gradients are clipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

RecordSteps = Literal["auto"] | bool


@dataclass(frozen=True)
class LocalTraining:
    """Settings of the local training of a round, named as in Lightning's Trainer.

    Attributes:
        epochs: Number of local epochs E; None where ``steps`` is given.
        steps: Number of optimizer steps, in place of ``epochs``; the client passes over its data as often as needed.
        accumulate_grad_batches: Number of batches per optimizer step.
        gradient_clip_val: Bound to which gradients are clipped, after the algorithm's terms were added; None clips
            nothing.
        gradient_clip_algorithm: How to clip: ``"norm"`` bounds the norm over all parameters, ``"value"`` each entry.
        record_steps: Which local steps are recorded and replayed. ``"auto"`` records a ``training_step`` that is marked
            by :func:`fedbc_lightning.recordable`; True records any, which is the same promise; False records none.
        schedule_rounds: Number of rounds T if a client's epochs and steps are counted over all rounds; None if the
            count begins anew in each round.
    """

    epochs: int | None = 1
    steps: int | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    record_steps: RecordSteps = "auto"
    schedule_rounds: int | None = None

    def num_steps(self, num_batches: int) -> int:
        """Return K_i, the number of optimizer steps of a client with ``num_batches`` batches, if none is skipped."""
        if self.steps is not None:
            return self.steps
        return -(-num_batches // self.accumulate_grad_batches) * (self.epochs or 0)

    def limits(self, num_batches: int) -> dict[str, int]:
        """Return the limits of a client's training under the names of Lightning's Trainer.

        If epochs and steps are counted over all rounds (``schedule_rounds``), the limits are those of a client that
        takes part in every round.

        Args:
            num_batches: Number of batches per epoch of the client.
        """
        rounds, steps_per_epoch = self.schedule_rounds or 1, -(-num_batches // self.accumulate_grad_batches)
        planned = self.num_steps(num_batches) * rounds
        return {
            "max_epochs": self.epochs * rounds if self.epochs is not None else -(-planned // steps_per_epoch),
            "max_steps": self.steps * rounds if self.steps is not None else -1,
            "estimated_stepping_batches": planned,
        }

    def clip(self, gradients: Tensor, sizes: Sequence[int]) -> None:
        """Clip the gradients of K clients in place.

        Args:
            gradients: One row per client, ``(K, d)``.
            sizes: Number of elements of each parameter; they sum up to d.
        """
        value = self.gradient_clip_val
        if not value:
            return
        if self.gradient_clip_algorithm == "value":
            gradients.clamp_(-value, value)
        else:
            # As torch.nn.utils.clip_grad_norm_, the norm of the parameters' norms and its 1e-6, so that one client has
            # the bits of lightning.Trainer, if the groups list the parameters in the module's order.
            each = [torch.linalg.vector_norm(part, dim=-1) for part in gradients.split(sizes, dim=-1)]
            norms = torch.linalg.vector_norm(torch.stack(each, dim=-1), dim=-1, keepdim=True)
            gradients.mul_((value / (norms + 1e-6)).clamp(max=1.0))

    def shortened(self, num_batches: int, rng: np.random.Generator) -> LocalTraining:
        """Return the settings of a straggler, which trains for less time.

        The number of epochs is drawn from 1..E-1. If E = 1, or if training is counted in steps, the number of steps is
        drawn from 1..K_i-1 instead.

        Args:
            num_batches: Number of batches per epoch of the client.
            rng: Generator of the draw.
        """
        if self.epochs is not None and self.epochs > 1:
            return replace(self, epochs=int(rng.integers(1, self.epochs)))
        steps = self.num_steps(num_batches)
        return replace(self, epochs=None, steps=int(rng.integers(1, steps)) if steps > 1 else 1)
