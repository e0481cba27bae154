"""Steps of one client from their recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedbc_lightning.core.private_torch import foreach_copy
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.local_step import LocalStep
from fedbc_lightning.engines.recorded.step_recorder import Recording
from fedbc_lightning.engines.step_function import log_replayed
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.collector import MetricCollector


class Replay:
    """Replays steps of one client.

    Args:
        bench: The workbench.
        collector: Takes what the steps log.
        step: What a step does with its gradient.
    """

    def __init__(self, bench: Workbench, collector: MetricCollector, step: LocalStep) -> None:
        self._bench, self._layout, self._collector, self._step = bench, bench.layout, collector, step

    def take(self, recording: Recording, batches: Sequence[Any], size: int) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Take a step on each of these batches; what is not an operation happens once for all of them.

        Args:
            recording: The recorded step.
            batches: Batches of its form.
            size: Number of samples of each batch.

        Returns:
            The loss of each step, and the gradients of the last one.
        """
        layout, views, first = self._layout, self._bench.grad_views, self._layout.num_grouped
        replay, parameters, take_step = recording.replay, layout.parameters, self._step.take
        self._collector.start_batch(batches[-1], size, num_batches=len(batches))
        rest: list[Sequence[Tensor]] = []
        for batch in batches:
            check()
            results = replay(*parameters, *batch)
            gradients = results[:first]
            foreach_copy(views, gradients)
            rest.append(results[first:])
            take_step()
        log_replayed(self._collector, recording.calls, [logged for _, *logged in rest], size)
        recording.credit -= len(batches)
        return [loss for loss, *_ in rest], gradients
