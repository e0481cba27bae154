"""Keeps metrics of the best value so far between evaluations, for each evaluated model and client apart."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import nn
from torchmetrics import MaxMetric, MinMetric

from fedbc_lightning.core.private_torch import set_updated
from fedbc_lightning.distributed.fabric import gather_objects

# The values that each metric holds; None for a metric without an update
State = list[list[float] | None]


class BestMetrics:
    """Keeps what ``MaxMetric`` and ``MinMetric`` hold between evaluations of the same model on the same data.

    All other metrics are reset for each client and evaluation. These two hold the best value of several evaluations,
    and must not mix models or clients.

    Args:
        module: The module that holds the metrics.

    Attributes:
        values: Map from the key of an evaluation to what the metrics held after the last one that was committed.
        key: Key of the evaluation that runs: its model and its data.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [metric for metric in module.modules() if isinstance(metric, (MaxMetric, MinMetric))]
        self.values: dict[str, State] = {}
        self._staged: dict[str, State] = {}
        self.key = ""

    def load(self) -> None:
        """Restore what the metrics, which have been reset, held after the last evaluation with the same key."""
        for metric, held in zip(self._metrics, self.values.get(self.key, []), strict=False):
            if held is not None:
                for name, value in zip(metric.metric_state, held, strict=True):
                    current = getattr(metric, name)
                    setattr(metric, name, torch.tensor(value, dtype=current.dtype, device=current.device))
                set_updated(metric)

    def stage(self) -> None:
        """Stage what the metrics hold after an evaluation."""
        if self._metrics:
            self._staged[self.key] = [
                [float(getattr(metric, name)) for name in metric.metric_state] if metric.update_called else None
                for metric in self._metrics
            ]

    def join(self, fabric: Fabric) -> None:
        """Exchange the staged values, since each process has evaluated other clients."""
        if self._metrics:
            for theirs in gather_objects(fabric, self._staged):
                self._staged |= theirs

    def commit(self) -> None:
        """Make the staged values the current ones."""
        self.values |= self._staged
        self._staged = {}

    def rollback(self) -> None:
        """Discard the staged values."""
        self._staged = {}
