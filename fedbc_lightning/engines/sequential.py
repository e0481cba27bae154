"""The sequential engine: one client after another through one workbench, by steps of the user's own optimizer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data.loading import ClientLoader
from fedbc_lightning.data.own_batches import OwnLoader
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.engines.client_run import ClientRun
from fedbc_lightning.engines.contrasted_step import ContrastedStep
from fedbc_lightning.engines.hooked_step import HookedStep
from fedbc_lightning.engines.local_step import LocalStep, Training
from fedbc_lightning.engines.manual_step import ManualStep
from fedbc_lightning.engines.plain_step import MissingGradientError, ReplayedStep, StepWay, WrittenStep
from fedbc_lightning.engines.solver_run import SolverRun
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.server.base import FEW_ROWS
from fedbc_lightning.state.cohort import Cohort, LocalResult

log = logging.getLogger("lightning.pytorch." + __name__)  # a child of Lightning's logger, whose lines are shown

# Largest number of clients that the server's parts get at once.
MAX_COHORT = FEW_ROWS
# Largest size of a cohort's matrices (K, d): they fit into a processor's cache together with a step's tensors; a GPU is
# waited for once in each cohort, so there they may be larger.
BYTES_OF_ROWS, BYTES_ON_GPU = 2**22, 2**30
# Number of these matrices: w, start, terms, staged state, and what the server's parts make of them.
NUM_MATRICES = 8


class SequentialEngine(BaseEngine):
    """Trains the clients of a cohort one after another.

    Args:
        bench: The workbench.

    Attributes:
        cohort_size: Largest number of clients that the server's parts get at once; above 1 for small models only.
    """

    def __init__(self, bench: Workbench) -> None:
        super().__init__(bench)
        layout = bench.layout
        row_bytes = NUM_MATRICES * layout.num_parameters * layout.master_dtype.itemsize
        # Hooks and moved buffers see one client after another, so each must be finished before the next one begins.
        is_alone = bench.has_client_hooks or layout.buffer_names
        most = BYTES_OF_ROWS if bench.row.is_cpu else BYTES_ON_GPU
        self.cohort_size = 1 if is_alone else max(1, min(MAX_COHORT, most // row_bytes))

    def group(self, positions: Sequence[int], num_steps: Sequence[int], alone: Collection[int]) -> list[list[int]]:
        """Return the cohorts of a round in the order of sampling, and at the end those of one client."""
        together, size = [p for p in positions if p not in alone], 1 if self.has_solver else self.cohort_size
        cohorts = [together[k : k + size] for k in range(0, len(together), size)]
        return cohorts + [[position] for position in positions if position in alone]

    def train(self, cohort: Cohort, asked: Training) -> None:
        """Train a cohort, client by client; a solver is given cohorts of one client."""
        if asked.solver is not None and len(cohort) > 1:
            raise ConfigurationError("algorithm: a method with its own solver must call engine.check_solver in check.")
        (OptimizerRun if asked.solver is None else SolverRun)(self.bench, cohort, asked).run()


class OptimizerRun(ClientRun):
    """Trains clients in epochs over their batches by steps of the user's own optimizer.

    A step is replayed if it was recorded (:class:`ReplayedStep`), taken as the module writes it (:class:`WrittenStep`),
    with Lightning's hooks inside (:class:`HookedStep`), or by the module itself (:class:`ManualStep`). What happens to
    its gradient is :class:`LocalStep`.

    Args:
        bench: The workbench.
        cohort: The clients.
        asked: What the method asks for.
    """

    def __init__(self, bench: Workbench, cohort: Cohort, asked: Training) -> None:
        super().__init__(bench, cohort, asked)
        self.step = step = LocalStep(self.layout, asked, bench.row[None], bench.grad[None])
        self._hooked, self._written = HookedStep(self, step), WrittenStep(self, step)
        self._replayed = ReplayedStep(self, step)
        self._manual = ManualStep(self, step) if self.optimizer.by_hand else None
        self._given: tuple[Any, ...] = (*asked.terms, asked.after_step)
        self._contrast = asked.contrast if asked.contrast is not None and asked.contrast.weight else None

    def train(self, k: int) -> None:
        """Run the epochs; see the base class."""
        try:
            self._train(k)
        except MissingGradientError:
            # The optimizer's state lies in flat slices and is lost with them, so the client starts again.
            log.info(
                "A step left a parameter without a gradient, which torch leaves alone: from here on the optimizer "
                "gets the module's own parameters, not flat slices. Same numbers, a little slower."
            )
            self.optimizer.use_per_tensor()
            self.cohort.started.pop(self.client, None)  # what on_client_start wrote is lost, too
            self._train(k)

    def _train(self, k: int) -> None:
        bench, optimizer, step = self.bench, self.optimizer, self.step
        # A hook on steps finds the gradient of the step before: the loss is computed inside of the step.
        self._is_plain = bench.takes_plain_steps and self._contrast is None and not optimizer.has_step_hooks
        if bench.scaler is not None:
            # The server's scale, so that no client depends on who was trained before it.
            bench.scaler.load_state_dict({**bench.scaler.state_dict(), "scale": bench.grad_scale, "_growth_tracker": 0})
        self.begin(k, informs_module=not bench.runs_only_training_step)
        # The method made terms for all K clients; each client's steps see its own row of them.
        is_alone, own = len(self.cohort) == 1, slice(k, k + 1)
        if self._contrast is not None:
            self.training_step = ContrastedStep(bench, self._contrast.part(own)).training_step
        *terms, after_step = [each if each is None or is_alone else each.part(own) for each in self._given]
        if terms or after_step is not None:
            step.use(terms, after_step)
            step.terms = bench.graphs.adopt(step.terms)
        step.start(lambda active: optimizer.plain_step(), lambda: bench.step_sizes(optimizer.rates))
        epoch, epochs, steps, stops = 0, self.local.epochs or 1, self.local.steps, self.user.shim
        with nullcontext() if self._manual is None else self._manual.listening():
            while not stops.is_client_stopped and (epoch < epochs if steps is None else self.num_steps < steps):
                self._run_epoch(epoch)
                epoch += 1

    @property
    def global_step(self) -> int:
        """Number of optimizer steps, of which a batch may have several in manual optimization."""
        return super().global_step if self._manual is None else self._manual.global_step

    def finish(self) -> LocalResult:
        """Return the mean gradient and the scale, too, and show callbacks the gradients of the last step."""
        scaler, count, trained = self.bench.scaler, self.num_gradients, super().finish()
        if self.step.gradient_sum is not None:
            mean = self.step.gradient_sum[0] / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))
            counts, shared = torch.as_tensor(count, device=mean.device).reshape(-1), self.layout.num_parameters
            trained.gradient_mean, trained.num_gradients = mean[None, :shared], counts[None, :shared]
        # No hook looks between the clients of a cohort.
        if self.replayed is not None and self.bench.has_hooks and self.client == self.cohort.ids[-1]:
            self.layout.show_gradients(self.replayed)
        if scaler is not None:
            trained.records[0]["grad_scale"] = scaler.get_scale()
        return trained

    def _run_epoch(self, epoch: int) -> None:
        self.start_epoch(epoch)
        steps_before = self.num_steps
        self._run_batches()
        self.bench.recorder.count_written(self.num_steps - steps_before)
        self.batches_passed += self.num_batches if self.is_epoch_over else self.collector.num_batches
        if self.local.steps is not None and self.num_steps == steps_before and not self.user.shim.is_client_stopped:
            raise ConfigurationError(
                f"model: a whole epoch of client {self.client} made no optimizer step (training_step returned None, or "
                "a hook skipped it), so trainer.local_steps would never be reached."
            )
        self.end_epoch()

    def _ways(self) -> list[StepWay]:
        """Return the ways to take the steps of an epoch; the first that can takes the next ones."""
        if not self._is_plain:
            return [self._hooked if self._manual is None else self._manual]
        may_replay = self.bench.recorder.reason is None and not self.optimizer.has_step_hooks and self.layout.trains_all
        return [self._replayed, self._written] if may_replay else [self._written]

    def _run_batches(self) -> None:
        """Take the steps of an epoch."""
        ways, loader = self._ways(), self.loader
        # Lists of batches of one form, between which nobody's code runs.
        is_known = type(loader) is ClientLoader and not self.user.has_transfer_hooks
        own = loader if isinstance(loader, OwnLoader) else None
        batches: Sequence[Any] = ()
        start = batch_idx = 0
        try:
            for found in loader.stretches() if is_known else ([batch] for batch in loader):
                start, batches = 0, found
                if own is not None:  # the number of a stream's batches is known at the last one
                    self.num_batches = batch_idx + 1 if own.is_last else max(self.num_batches, batch_idx + 2)
                batches = self._on_device(found)
                while start < len(batches):
                    count = next(filter(None, (way.take(batches, start, batch_idx) for way in ways)))
                    start, batch_idx = start + count, batch_idx + count
                    is_enough = self.local.steps is not None and self.num_steps >= self.local.steps
                    if self.is_epoch_over or is_enough or self.user.shim.is_client_stopped:
                        if self._is_plain and batch_idx >= self.num_batches:
                            self.step_schedulers()
                        return
        except Exception as error:
            self.tell(error, batch_idx, batches[start] if start < len(batches) else None)
            raise
        if self._is_plain:  # a loader of the user's may have given fewer batches than it says, or more
            self.step_schedulers()

    def _on_device(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return batches of one form on the device: where the first lies there already, all do."""
        to_device = self.user.to_device
        first = to_device(batches[0])
        return batches if first is batches[0] else [first, *map(to_device, batches[1:])]
