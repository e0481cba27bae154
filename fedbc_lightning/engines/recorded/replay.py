"""A client's steps from their recordings, and the comparison of compiled loops with them."""

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
from fedbc_lightning.local import Term
from fedbc_lightning.module.client_optimizers import LocalOptimizer
from fedbc_lightning.module.collector import MetricCollector

NUM_COMPARED = 2
"""Number of steps in a call of a compiled loop that is compared: a loop that goes wrong does so from the second on."""


class Replay:
    """Replays the steps of an epoch of one client, or takes them in calls of a compiled loop.

    Args:
        bench: The workbench.
        collector: Takes what the steps log.
        optimizer: The optimizer.
        changes: What happens in a step after its gradient has come into the row, in order.
        sgd: Settings and momentum of SGD if a step is its step on the gradient with the terms, and no more; else None.
        terms: The terms that are added to the gradient, also those that are zero for this client.
        is_visited: Whether other code runs between the steps.
    """

    def __init__(
        self, bench: Workbench, collector: MetricCollector, optimizer: LocalOptimizer,
        changes: Sequence[Callable[[], Any]], sgd: tuple[dict[str, Any], Tensor] | None, terms: Sequence[Term],
        is_visited: bool,
    ) -> None:  # fmt: skip
        self._bench, self._layout, self._collector, self._optimizer = bench, bench.layout, collector, optimizer
        self._changes, self._sgd, self._terms, self._is_visited = changes, sgd, terms, is_visited

    def take(
        self, recording: Recording, batches: Sequence[Any], size: int
    ) -> tuple[list[Sequence[Tensor]], Sequence[Tensor] | None]:
        """Take a step on each of these batches; what is not an operation happens once for all of them.

        Args:
            recording: The recorded step.
            batches: Batches of its form; only one if other code runs between the steps.
            size: Number of samples of each batch.

        Returns:
            The loss of each step and what it logged, and the gradients of the last one, or None if it was compiled. If
            they are compared with compiled ones, there are fewer steps than batches.
        """
        compiler = self._bench.compiler
        compiled = compiler.ready(recording, self._sgd, self._terms, batches)
        is_compared = compiled is not None and compiled.num_compared != recording.num_compared
        if is_compared:
            batches = batches[:NUM_COMPARED]
        self._collector.start_batch(batches[-1], size, num_batches=len(batches))
        gradients: Sequence[Tensor] | None = None
        with torch.no_grad():
            if compiled is None:
                rest, gradients = self._replay_each(recording, batches, size)
            elif is_compared:
                compiled.predict(batches)
                rest, gradients = self._replay_each(recording, batches, size)
                compiler.compare(recording, compiled, rest)
            else:
                rest = compiled.take(batches)
                self._layout.hide_gradients()
        if not self._is_visited:
            log_replayed(self._collector, recording.calls, [logged for _, *logged in rest], size)
        recording.credit -= len(batches)
        return rest, gradients

    def _replay_each(
        self, recording: Recording, batches: Sequence[Any], size: int
    ) -> tuple[list[Sequence[Tensor]], Sequence[Tensor]]:
        """Take one step after another; return the loss of each and what it logged, and the last one's gradients."""
        layout, views = self._layout, self._bench.grad_views
        replay, parameters, changes, first = recording.replay, layout.parameters, self._changes, layout.num_grouped
        rest: list[Sequence[Tensor]] = []
        for batch in batches:
            check()
            results = replay(*parameters, *batch)
            gradients = results[:first]
            foreach_copy(views, gradients)
            rest.append(results[first:])
            if self._is_visited:  # what the step logged comes before what a hook of the optimizer logs
                log_replayed(self._collector, recording.calls, [results[first + 1 :]], size)
                layout.show_gradients(gradients)
                self._optimizer.show_gradient()
            for change in changes:
                change()
        return rest, gradients
