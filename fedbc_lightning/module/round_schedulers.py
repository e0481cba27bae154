"""Learning-rate schedulers of the server, which are stepped once per round by what the round or its evaluation logs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.module.monitors import OF_TEST, OF_VALIDATION, is_of_evaluation, name_in_log


class RoundSchedulers:
    """Holds the schedulers of the server, whose learning rates are those with which the clients of a round start.

    Args:
        optimizer: The optimizer that they were made for; no client uses it.
        configs: Schedulers of interval ``round``, and those that monitor what evaluation logs.
    """

    def __init__(self, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig]) -> None:
        self._optimizer, self._configs = optimizer, configs

    @property
    def monitored(self) -> list[str]:
        """The names that evaluation must log."""
        names = [config.monitor for config in self._configs if config.reduce_on_plateau]
        return [n for n in names if n and (n.startswith((*OF_VALIDATION, *OF_TEST)) or is_of_evaluation(n))]

    @property
    def learning_rates(self) -> list[float] | None:
        """Learning rate of each parameter group; None without schedulers of the server."""
        return [float(group["lr"]) for group in self._optimizer.param_groups] if self._configs else None

    def check(self, metrics: Collection[str]) -> None:
        """Check that an evaluation, if there was one, logged the monitored metrics.

        Args:
            metrics: Metrics of the round by name.

        Raises:
            ConfigurationError: An evaluation did not log a monitored metric.
        """
        if not any(map(is_of_evaluation, metrics)):
            return
        for config in self._configs:
            name = name_in_log(config.monitor or "", metrics)
            if config.monitor in self.monitored and config.strict and name not in metrics:
                there = ", ".join(sorted(filter(is_of_evaluation, metrics)))
                raise ConfigurationError(
                    f"model: a scheduler monitors '{config.monitor}', which evaluation did not log; there is: {there}."
                )

    def step(self, round: int, metrics: dict[str, float]) -> None:
        """End a round; a scheduler that monitors a metric moves in the rounds that logged it."""
        self.check(metrics)
        # The server's schedulers hold an optimizer that never trains: its learning rates alone are given to the
        # clients.
        for config in self._configs:
            self._optimizer.zero_grad()
            self._optimizer.step()  # without gradients it changes nothing, but schedulers warn if it never ran
            if round % config.frequency:
                continue
            scheduler: Any = config.scheduler
            if not config.reduce_on_plateau:
                scheduler.step()
                continue
            name = name_in_log(config.monitor or "", metrics)
            if name in metrics:
                scheduler.step(metrics[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the schedulers and the learning rates."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        return (
            {"schedulers": [c.scheduler.state_dict() for c in self._configs], "groups": groups} if self._configs else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for config, saved in zip(self._configs, state.get("schedulers", []), strict=True):
            config.scheduler.load_state_dict(saved)
        for group, saved in zip(self._optimizer.param_groups, state.get("groups", []), strict=False):
            group.update(saved)


def is_of_rounds(config: LRSchedulerConfig) -> bool:
    """Return whether a scheduler of interval ``epoch`` monitors what only an evaluation after the round logs."""
    name = config.monitor or ""
    is_of_epochs = config.reduce_on_plateau and config.interval == "epoch"
    return is_of_epochs and (name.startswith(OF_VALIDATION) or is_of_evaluation(name))
