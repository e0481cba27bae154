"""Steps in which nobody's code but ``training_step`` runs: as the module writes it, or replayed from a recording."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.private_torch import foreach_copy, run_backward
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.client_run import ClientRun
from fedbc_lightning.engines.local_step import LocalStep
from fedbc_lightning.engines.recorded.step_graphs import STEPS_IN_A_ROW
from fedbc_lightning.engines.recorded.step_recorder import Recording
from fedbc_lightning.engines.step_function import StepOutput, log_replayed
from fedbc_lightning.module.mistakes import refuse_loss


class StepWay(ABC):
    """A way to take a client's steps; they differ in where the gradient comes from and in whose code sees it.

    Args:
        run: The client's training.
        step: What happens to the gradient.
    """

    def __init__(self, run: ClientRun, step: LocalStep) -> None:
        self._run, self._step, self._bench, self._layout = run, step, run.bench, run.layout

    @abstractmethod
    def take(self, batches: Sequence[Any], start: int, batch_idx: int) -> int:
        """Take steps on the batches that come next.

        Args:
            batches: Batches of one form. They are not cut apart here: there may be thousands, and each may be a step.
            start: Place of the next one, which is there.
            batch_idx: Number of the next one in its epoch.

        Returns:
            Number of batches that were taken; 0 if the next one must be taken in another way.
        """

    def skip(self, batch_idx: int) -> int:
        """Pass a batch that is None, for which Lightning takes no step either; schedulers of steps go on."""
        run, accumulate = self._run, self._run.local.accumulate_grad_batches
        self._bench.say("data: a training loader yielded None; no step is taken for such a batch.")
        run.collector.start_batch(None, 0)
        if (batch_idx + 1) % accumulate == 0 or batch_idx + 1 == run.num_batches:
            run.count_step(batch_idx, is_update=False, num_steps=0)
        return 1


class MissingGradientError(Exception):
    """A step left a parameter of the optimizer without a gradient.

    torch's optimizers leave such a parameter alone. As part of a flat slice, momentum and weight decay would move it.
    """


class WrittenStep(StepWay):
    """Takes one step as the module writes it, and compares it with its replay if it is time."""

    def take(self, batches: Sequence[Any], start: int, batch_idx: int) -> int:
        """Take one step, see the base class.

        Raises:
            MissingGradientError: A parameter has no gradient, so the optimizer cannot work on flat slices.
        """
        run, layout, recorder, batch = self._run, self._layout, self._bench.recorder, batches[start]
        if batch is None:
            return self.skip(batch_idx)
        size = run.start_batch(batch, batch_idx)
        is_compared = recorder.listen()
        loss, _ = run.training_step(batch, batch_idx)
        # Only now, as in Lightning's loop: training_step may look at the gradients of the last step.
        layout.drop_gradients()
        if loss is not None:
            refuse_loss(loss, run.module)
            run.count_loss(loss, size)
            if is_compared or recorder.is_due:
                recorder.look_at(loss)
            run_backward(loss)
            if not layout.gather_gradients(self._bench.optimized_grad):
                raise MissingGradientError
        if is_compared:  # before schedulers log more, or read what was logged
            gradients: list[Any] = [parameter.grad for parameter in layout.parameters[: layout.num_grouped]]
            recorder.compare(None if loss is None else StepOutput(gradients, run.losses[-1], [], layout.buffers()))
        if loss is not None:
            run.num_gradients += 1
            run.optimizer.show_gradient()  # the step may have called self.optimizers().zero_grad()
            with torch.no_grad():
                self._step.take()
        run.count_step(batch_idx, is_update=loss is not None)
        return 1


class ReplayedStep(StepWay):
    """Replays recorded steps, as many in a row as the recording's credit allows."""

    def take(self, batches: Sequence[Any], start: int, batch_idx: int) -> int:
        """Replay steps, see the base class."""
        run, buffers = self._run, self._layout.buffers()
        parameters = [*self._layout.parameters, *buffers]
        with torch.no_grad():
            recording = self._bench.recorder.ready("single", parameters, batches[start])
        if recording is None:
            return 0
        # A scheduler's code runs between the steps, so it finds each of them counted and logged.
        count = 1 if run.optimizer.has_schedulers else min(recording.credit, len(batches) - start)
        if run.local.steps is not None:
            count = min(count, run.local.steps - run.num_steps)
        replayed = batches[start : start + count]
        size = run.size_of(replayed[0], batch_idx)
        with torch.no_grad():  # but not around the schedulers below, whose code may use autograd
            # What is not an operation happens once for all of these steps.
            graph = self._bench.graphs.find(recording, self._step, replayed[0])
            replayed = replayed if graph is None else replayed[:STEPS_IN_A_ROW]
            run.collector.start_batch(replayed[-1], size, num_batches=(count := len(replayed)))
            if graph is None:
                told: list[Sequence[Tensor]] = [
                    self._replay(recording, parameters, buffers, batch) for batch in replayed
                ]
            else:
                told, run.replayed = graph.take(replayed, buffers), graph.gradients
            run.losses += [loss for loss, *_ in told]
            log_replayed(run.collector, recording.calls, [logged for _, *logged in told], size)
        run.sizes += [size] * count
        recording.credit -= count
        run.num_gradients += count
        run.count_step(batch_idx + count - 1, num_steps=count)
        return count

    def _replay(
        self, recording: Recording, parameters: Sequence[Tensor], buffers: list[Tensor], batch: Any
    ) -> Sequence[Tensor]:
        """Take one step operation by operation, and return its loss and what it has logged."""
        check()
        results, first = recording.operations(*parameters, *batch), self._layout.num_grouped
        self._run.replayed = results[:first]
        foreach_copy(self._bench.grad_views, tuple(self._run.replayed))
        if buffers:
            foreach_copy(buffers, results[-len(buffers) :])
        self._step.take()
        return results[first:]
