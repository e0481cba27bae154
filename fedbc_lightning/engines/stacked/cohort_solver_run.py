"""Local training of K clients at once by a solver that writes out its own steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.engines.local_step import Training
from fedbc_lightning.engines.solver_run import SolverSteps, weight_decay_terms
from fedbc_lightning.engines.stacked.cohort_batches import Stack, stacked_batches
from fedbc_lightning.engines.stacked.cohort_run import CohortRun
from fedbc_lightning.engines.stacked.stacked_bench import StackedBench
from fedbc_lightning.state.cohort import Cohort

if TYPE_CHECKING:
    from fedbc_lightning.local.client import Client


@dataclass
class CohortBatch:
    """The next batch of every client.

    Attributes:
        stacks: The batches, stacked by size.
        is_counted: Whether their losses and what they logged were counted already; the first gradient on them counts.
    """

    stacks: list[Stack]
    is_counted: bool = False


class CohortSolverRun(CohortRun, SolverSteps):
    """Trains K clients by a solver, which takes equally many steps for each of them.

    Args:
        stacked: The workbench for many clients at once.
        cohort: The K clients.
        asked: What the method asks for: the solver, and the terms of all K clients.

    Attributes:
        num_steps: Number of steps taken so far.
        num_batches: Number of batches per epoch of each client, (K, 1) float64.
        rates: The user's learning rates: (1, 1), or (1, d) if they differ between parameters.
    """

    def __init__(self, stacked: StackedBench, cohort: Cohort, asked: Training) -> None:
        super().__init__(stacked, cohort, asked)
        self.terms = [*(term for term in asked.terms if not term.is_zero), *weight_decay_terms(stacked.bench)]
        self.solver: Any = asked.solver
        self.num_steps = self.num_drawn = 0
        self._batches: Iterator[tuple[int, list[Stack]]] = iter(())

    def run(self) -> None:
        """Train all clients, and hand the cohort the result.

        Raises:
            ConfigurationError: The solver takes different numbers of steps for the clients.
        """
        self.begin(self.w)
        # `check_solver` lets only solvers pass that do without component gradients, which a cohort cannot give.
        client = cast("Client", self)
        solver, lengths = self.solver, self.loaders.num_batches.tolist()
        self.num_batches = torch.tensor(lengths, dtype=torch.float64)[:, None]
        self.rates = self.bench.step_sizes(self.optimizer.rates)
        steps = torch.as_tensor(solver.num_steps(client)).unique()
        if len(steps) > 1:
            raise ConfigurationError(
                f"algorithm: {type(solver).__name__} takes {int(steps[0])} to {int(steps[-1])} steps for clients that "
                "are trained at once; call engine.check_solver in the method's check, or use engine: sequential."
            )
        num_steps = int(steps)
        num_drawn = num_steps * solver.batches_per_step
        # The shortest client passes through the most epochs until all have drawn as many batches.
        num_epochs = -(-num_drawn // min(lengths))
        self._batches = stacked_batches(self.loaders, num_epochs, [num_drawn] * len(lengths))
        self.bench.work.begin(self.cohort.ids, num_steps * len(lengths))
        solver.begin(client)
        for _ in range(num_steps):
            solver.step(client)
            self.num_steps += 1
            self.bench.work.num_steps += len(lengths)
        solver.end(client)
        self.finish([num_steps] * len(lengths))

    def batches_passed(self, steps: list[int]) -> list[int]:
        """Return the number of batches that the solver has drawn, which may be several per step."""
        return [self.num_drawn] * len(steps)

    # what a solver asks for

    def next_batch(self) -> CohortBatch:
        """Return the next batch of each client's shuffled data; a new epoch starts whenever one ends.

        Raises:
            ConfigurationError: The solver draws more batches than its ``batches_per_step`` allows.
        """
        try:
            _, stacks = next(self._batches)
        except StopIteration:
            name = type(self.solver).__name__
            raise ConfigurationError(
                f"algorithm.solver: {name} draws more batches in a step than its batches_per_step, "
                f"{self.solver.batches_per_step}; correct that number."
            ) from None
        self.num_drawn += 1
        return CohortBatch(stacks)

    @property
    def first_client(self) -> int:
        """Index of the first client."""
        return self.cohort.ids[0]

    def evaluate(self, w: Tensor, batch: CohortBatch) -> tuple[Tensor, Tensor]:
        """Return the losses (K, 1) and their gradients (K, d), both without the terms."""
        loss, gradient = w.new_empty(len(w), 1), torch.zeros_like(w)
        for stack in batch.stacks:
            for part, output in self.gradients(w, stack, gradient):
                losses = output.loss.reshape(-1).to(loss)
                rows = upload(torch.from_numpy(part.rows), w.device)
                loss[rows, 0] = losses[rows] if part.is_aligned else losses
                if not batch.is_counted:
                    self.counted.add(part, output)
        batch.is_counted = True
        return loss, gradient
