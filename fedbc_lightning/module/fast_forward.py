"""Learning-rate schedulers that go on where a client left them: made afresh and stepped as often as it had."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

STRIDE = 100
"""The state is kept after so many epochs or steps each, so that no client is stepped through more than these."""


class ScheduleState(NamedTuple):
    """Where schedulers stand.

    Attributes:
        groups: The options of each parameter group, such as the learning rate, which schedulers write.
        schedulers: The ``state_dict`` of each.
    """

    groups: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig]) -> ScheduleState:
        """Copy that of an optimizer and its schedulers."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return copy.deepcopy(cls(groups, [config.scheduler.state_dict() for config in configs]))

    def load(self, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig]) -> None:
        """Let others that were made alike stand there, too."""
        state = copy.deepcopy(self)
        for group, values in zip(optimizer.param_groups, state.groups, strict=True):
            group.update(values)
        for config, values in zip(configs, state.schedulers, strict=True):
            config.scheduler.load_state_dict(values)


class FastForward:
    """Moves new schedulers to any count of epochs or steps; the result depends on nothing but the count.

    What is kept in between only saves time, so a resumed run, which begins with none of it, has the same numbers.
    """

    def __init__(self) -> None:
        self._states: dict[Hashable, dict[int, ScheduleState]] = {}

    def move(
        self, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig], count: int, made_from: Hashable | None
    ) -> None:
        """Step schedulers that are new as they were stepped in so many epochs or steps.

        Args:
            optimizer: Theirs.
            configs: All of one interval.
            count: Epochs or steps, by that interval.
            made_from: Equal where schedulers are made alike; None: they may be like no others.
        """
        known = {} if made_from is None else self._states.setdefault(made_from, {})
        start = next((k for k in range(count - count % STRIDE, 0, -STRIDE) if k in known), 0)
        if start:
            known[start].load(optimizer, configs)
        for done in range(start + 1, count + 1):
            step_quietly([config for config in configs if done % config.frequency == 0])
            if done % STRIDE == 0:
                known[done] = ScheduleState.of(optimizer, configs)


def step_quietly(configs: Sequence[LRSchedulerConfig]) -> None:
    """Step schedulers whose optimizer does not step, of which they would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config in configs:
            scheduler: Any = config.scheduler
            scheduler.step()
