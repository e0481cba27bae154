"""Metrics that live over evaluations: the best value so far, of each evaluated model and client by itself."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import nn
from torchmetrics import MaxMetric, MinMetric

from fedbc_lightning.core.private_torch import set_updated
from fedbc_lightning.distributed.fabric import gather_objects

State = list[list[float] | None]
"""The values that each metric holds; None for a metric that was not updated."""


class BestMetrics:
    """Keeps what ``MaxMetric`` and ``MinMetric`` hold between evaluations of the same model on the same data.

    All other metrics are reset for each client and evaluation. These two say what was best over evaluations, which
    would be the best of all models and clients if they went from one to the next.

    Args:
        module: Whose metrics.

    Attributes:
        values: Which evaluation -> what the metrics held after the last one that was committed.
        key: Which evaluation is under way: of which model on whose data.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [metric for metric in module.modules() if isinstance(metric, (MaxMetric, MinMetric))]
        self.values: dict[str, State] = {}
        self._staged: dict[str, State] = {}
        self.key = ""

    def load(self) -> None:
        """Give the metrics what they held after the last evaluation of this kind; they were reset."""
        for metric, held in zip(self._metrics, self.values.get(self.key, []), strict=False):
            if held is not None:
                for name, value in zip(metric.metric_state, held, strict=True):
                    current = getattr(metric, name)
                    setattr(metric, name, torch.tensor(value, dtype=current.dtype, device=current.device))
                set_updated(metric)

    def stage(self) -> None:
        """Keep what the metrics hold after an evaluation."""
        if self._metrics:
            self._staged[self.key] = [
                [float(getattr(metric, name)) for name in metric.metric_state] if metric.update_called else None
                for metric in self._metrics
            ]

    def join(self, fabric: Fabric) -> None:
        """Exchange what was staged: each process has evaluated others."""
        if self._metrics:
            for theirs in gather_objects(fabric, self._staged):
                self._staged |= theirs

    def commit(self) -> None:
        """Make what was staged the current values."""
        self.values |= self._staged
        self._staged = {}

    def rollback(self) -> None:
        """Forget what was staged."""
        self._staged = {}
