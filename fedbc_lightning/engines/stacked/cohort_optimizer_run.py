"""Local training of K clients at once by the user's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.engines.local_step import LocalStep
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
        super().__init__(stacked, cohort, local, ())
        self.grad = torch.zeros_like(self.w)
        self.step = LocalStep(self.layout, local, self.w, self.grad, terms, after_step, trains, keep_mean)
        self._steps_taken = 0

    def run(self, start: Tensor, lr_scale: float, purpose: str) -> None:
        """Train all clients from their start models (d,) or (K, d), and hand the cohort the result."""
        self.begin(start, lr_scale, purpose, self.grad)
        optimizer = self.optimizer
        self.step.start(lambda active: partial(optimizer.step, active), lambda: self.bench.step_sizes(optimizer.rates))
        self.finish(self.train(), self.step.gradient_sum)

    def place(self, row: int) -> str:
        """Return the client of a row, the round, and the batch within the epoch, for a note on an exception."""
        return f"{super().place(row)}, batch {self._steps_taken % int(self.loaders.num_batches[row])}"

    def train(self) -> list[int]:
        """Take all steps of all clients, and return how many each has taken."""
        num_batches = self.loaders.num_batches
        steps = list(map(self.local.num_steps, num_batches.tolist()))
        self.bench.work.begin(self.cohort.ids, sum(steps))
        num_epochs = self.local.epochs or int((-(-np.array(steps) // num_batches)).max())
        batches = stacked_batches(self.loaders, num_epochs, steps)
        for self._steps_taken, (active, stacks) in enumerate(batches):
            for stack in stacks:
                for part, output in self.gradients(self.w, stack, self.grad):
                    self.counted.add(part, output)
            with torch.no_grad():
                self.step.take(active)
            self.bench.work.num_steps += active
        return steps
