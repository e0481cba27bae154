"""Local training of K clients at once by the user's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.engines.stacked.cohort_batches import stacked_batches
from fedbc_lightning.engines.stacked.cohort_run import CohortRun
from fedbc_lightning.engines.stacked.stacked_bench import StackedBench
from fedbc_lightning.local import AfterStep, Term
from fedbc_lightning.local.engine import Trains
from fedbc_lightning.state.cohort import Cohort


class CohortOptimizerRun(CohortRun):
    """Trains K clients: each step is one mapped step, the K gradients of the terms, and one elementwise optimizer step.

    The clients with the most steps stand first, so those that are still training are always the first rows. Which
    clients are mapped together depends on their numbers of samples alone, never on what is recorded, so recording does
    not change a number.

    Args:
        stacked: The workbench for many clients at once.
        cohort: The K clients.
        local: The local training of each client.
        terms: The method's terms, for all K clients.
        after_step: Change that is applied to w after every step, or None.
        keep_mean: Whether to record the mean raw gradient.
        trains: Part of the model that is trained, see :meth:`fedbc_lightning.local.engine.Engine.solve`.
    """

    def __init__(
        self, stacked: StackedBench, cohort: Cohort, local: LocalTraining, terms: Sequence[Term],
        after_step: AfterStep | None, keep_mean: bool, trains: Trains = "all",
    ) -> None:  # fmt: skip
        super().__init__(stacked, cohort, local, terms)
        self.after_step = after_step
        self.grad = torch.zeros_like(self.w)
        self._held, self._held_values = self.layout.held_part(trains), self.w
        self.gradient_sum = torch.zeros_like(self.w) if keep_mean else None
        self._steps_taken = 0

    def run(self, start: Tensor, lr_scale: float, purpose: str) -> None:
        """Train all clients from their start models (d,) or (K, d), and hand the cohort the result."""
        self.begin(start, lr_scale, purpose, self.grad)
        if self._held is not None:
            self._held_values = self.w[:, self._held].clone()
        steps = self.train()
        self.finish(steps, self.counted.means(), self.gradient_sum)

    def place(self, row: int) -> str:
        """Return the client of a row, the round, and the batch within the epoch, for a note on an exception."""
        return f"{super().place(row)}, batch {self._steps_taken % int(self.loaders.num_batches[row])}"

    def train(self) -> list[int]:
        """Take all steps of all clients, and return how many each has taken."""
        loaders, optimizer = self.loaders, self.optimizer
        num_batches = loaders.num_batches
        steps = list(map(self.local.num_steps, num_batches.tolist()))
        self.bench.work.begin(self.cohort.ids, sum(steps))
        num_epochs = self.local.epochs or int((-(-np.array(steps) // num_batches)).max())
        terms: list[Any] = self.terms
        num_rows, can_shrink = len(loaders), all(hasattr(term, "first") for term in terms)
        batches = stacked_batches(loaders, num_epochs, steps)
        for self._steps_taken, (active, stacks) in enumerate(batches):
            for stack in stacks:
                for part, output in self.gradients(self.w, stack, self.grad):
                    self.counted.add(part, output)
            with torch.no_grad():
                if self.gradient_sum is not None:
                    self.gradient_sum[:active] += self.grad[:active]
                # The rows of finished clients are left in the terms until they are half of them: cutting costs, too.
                if can_shrink and active <= num_rows // 2:
                    num_rows = active
                    terms = [term.first(num_rows) for term in terms]
                for term in terms:
                    term.add_gradient(self.shared(self.grad)[:num_rows], self.shared(self.w)[:num_rows])
                if self._held is not None:
                    self.grad[:, self._held].zero_()
                self.local.clip(self.grad[:active, : self.layout.num_optimized])
                optimizer.step(active)
                self.bench.work.num_steps += active
                if self.after_step is not None:
                    ended = self.w[active:].clone()
                    self.after_step.apply(self.shared(self.w), self.bench.step_sizes(optimizer.rates))
                    self.w[active:] = ended
                if self._held is not None:  # weight decay moves what has no gradient
                    self.w[:, self._held] = self._held_values
        return steps
