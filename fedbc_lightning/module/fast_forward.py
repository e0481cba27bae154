"""Moves new learning-rate schedulers to where a client left its own in an earlier round."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

# Number of epochs or steps between kept states; no client is stepped through more than these
STRIDE = 100


class ScheduleState(NamedTuple):
    """The state of schedulers and of the parameter groups that they write.

    Attributes:
        groups: The options of each parameter group, such as the learning rate, which schedulers write.
        schedulers: The ``state_dict`` of each scheduler.
    """

    groups: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]

    @classmethod
    def read(cls, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig]) -> ScheduleState:
        """Copy the state of an optimizer's groups and of its schedulers."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return copy.deepcopy(cls(groups, [config.scheduler.state_dict() for config in configs]))

    def load(self, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig]) -> None:
        """Write the state into another optimizer and its schedulers, which were made alike."""
        state = copy.deepcopy(self)
        for group, values in zip(optimizer.param_groups, state.groups, strict=True):
            group.update(values)
        for config, values in zip(configs, state.schedulers, strict=True):
            config.scheduler.load_state_dict(values)


class FastForward:
    """Moves new schedulers to any count of epochs or steps; the result depends on nothing but the count.

    Kept states only save time, so a resumed run, which starts without any, has the same numbers.
    """

    def __init__(self) -> None:
        self._states: dict[Hashable, dict[int, ScheduleState]] = {}

    def move(
        self, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig], count: int, made_from: Hashable | None
    ) -> None:
        """Step new schedulers as often as a client stepped its own in ``count`` epochs or steps.

        Args:
            optimizer: Optimizer of the schedulers.
            configs: Schedulers of one interval.
            count: Number of epochs or steps, as the interval says.
            made_from: Key that is equal for schedulers that were made alike; None for schedulers unlike any others.
        """
        known = {} if made_from is None else self._states.setdefault(made_from, {})
        # A client comes back after any number of rounds. From the nearest kept state below its count, fewer than STRIDE
        # steps are left; the numbers are those of a scheduler that was stepped from the beginning.
        start = next((k for k in range(count - count % STRIDE, 0, -STRIDE) if k in known), 0)
        if start:
            known[start].load(optimizer, configs)
        for done in range(start + 1, count + 1):
            _step_quietly([config for config in configs if done % config.frequency == 0])
            if done % STRIDE == 0:
                known[done] = ScheduleState.read(optimizer, configs)


def _step_quietly(configs: Sequence[LRSchedulerConfig]) -> None:
    """Step schedulers without the warning that their optimizer has not stepped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config in configs:
            scheduler: Any = config.scheduler
            scheduler.step()
