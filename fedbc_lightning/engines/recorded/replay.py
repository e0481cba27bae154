"""Steps of one client from their recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.private_torch import foreach_copy
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.recorded.step_recorder import Recording
from fedbc_lightning.engines.step_function import log_replayed
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.collector import MetricCollector


class Replay:
    """Replays the steps of an epoch of one client.

    Args:
        bench: The workbench.
        collector: Takes what the steps log.
        changes: What happens in a step after its gradient has come into the row, in order.
    """

    def __init__(self, bench: Workbench, collector: MetricCollector, changes: Sequence[Callable[[], Any]]) -> None:
        self._bench, self._layout, self._collector, self._changes = bench, bench.layout, collector, changes

    def take(
        self, recording: Recording, batches: Sequence[Any], size: int
    ) -> tuple[list[Sequence[Tensor]], Sequence[Tensor]]:
        """Take a step on each of these batches; what is not an operation happens once for all of them.

        Args:
            recording: The recorded step.
            batches: Batches of its form.
            size: Number of samples of each batch.

        Returns:
            The loss of each step and what it logged, and the gradients of the last one.
        """
        layout, views, first = self._layout, self._bench.grad_views, self._layout.num_grouped
        replay, parameters, changes = recording.replay, layout.parameters, self._changes
        self._collector.start_batch(batches[-1], size, num_batches=len(batches))
        rest: list[Sequence[Tensor]] = []
        with torch.no_grad():
            for batch in batches:
                check()
                results = replay(*parameters, *batch)
                gradients = results[:first]
                foreach_copy(views, gradients)
                rest.append(results[first:])
                for change in changes:
                    change()
        log_replayed(self._collector, recording.calls, [logged for _, *logged in rest], size)
        recording.credit -= len(batches)
        return rest, gradients
