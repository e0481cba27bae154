"""Collects the values that ``self.log`` logs inside a client or an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor
from torchmetrics import Metric

from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.private_lightning import sizes_in

PREFIXES = ("train", "val", "valid", "validation", "test")


def plain_name(name: str) -> str:
    """Return a logged name without the prefix of its stage, so that it can get ours.

    Example:
        >>> plain_name("train_loss"), plain_name("val/accuracy"), plain_name("auroc")
        ('loss', 'accuracy', 'auroc')
    """
    for separator in ("_", "/"):
        head, found, tail = name.partition(separator)
        if found and tail and head in PREFIXES:
            return tail
    return name


def reduction(reduce_fx: Any) -> str:
    """Return the name of a reduction that ``self.log`` was given as a name or a function.

    Example:
        >>> reduction("avg"), reduction(torch.mean), reduction(max)
        ('mean', 'mean', 'max')
    """
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "?")
    return "mean" if name == "avg" else name


def batch_size_of(batch: Any, expected: int) -> int:
    """Return the number of samples of a batch: the length of its first tensor, or ``expected`` if it has no tensor."""
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if isinstance(first, Tensor):
        return first.size(0) if first.ndim else 1
    return next((size for size in sizes_in(batch) if size is not None), expected)


_cache = WarningCache()


def _warn_if_ambiguous(batch: Any) -> None:
    """Warn once if the tensors of a batch have different lengths, since logged values are weighted by the first."""
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Tensor):
        return
    sizes = {size for size in sizes_in(batch) if size is not None}
    if len(sizes) > 1:
        _cache.warn(
            "The tensors of a batch differ in their first dimension, of which the first tensor's weights what is "
            "logged; give its number of samples: self.log(..., batch_size=...)."
        )


@dataclass
class _Logged:
    """The values logged under one name in the current epoch."""

    reduce: str
    total: Any = 0.0
    weight: float = 0.0
    metric: Metric | None = None

    def add(self, value: Any, weight: float) -> None:
        if self.reduce == "mean":
            self.total = self.total + value * weight
        elif self.weight == 0:
            self.total = value
        elif self.reduce == "sum":
            self.total = self.total + value
        else:
            self.total = (torch.maximum if self.reduce == "max" else torch.minimum)(
                torch.as_tensor(self.total), torch.as_tensor(value)
            )
        self.weight += weight

    def add_all(self, values: Sequence[Any], weight: float) -> None:
        """Add values of equal weight, one after another: NumPy's ``accumulate`` rounds as a loop of additions does."""
        total = self.total if isinstance(self.total, Tensor) else torch.as_tensor(self.total, dtype=values[0].dtype)
        products = torch.stack([total, *values])
        products[1:] *= weight
        with np.errstate(all="ignore"):  # sums of infinities are as silent as torch's
            self.total = torch.from_numpy(np.add.accumulate(products.numpy()))[-1]
        self.weight += weight * len(values)

    def can_add_all(self, values: Sequence[Any], weight: Any) -> bool:
        """Return whether :meth:`add_all` gives the bits of :meth:`add`; if not, this takes one value after another."""
        first = values[0]
        if self.reduce != "mean" or not isinstance(weight, int) or not isinstance(first, Tensor) or not first.is_cpu:
            return False
        is_alike = self.total.dtype == first.dtype if isinstance(self.total, Tensor) else self.total == 0
        return is_alike and first.dtype in (torch.float32, torch.float64)

    def value(self) -> Any:
        return self.total / self.weight if self.reduce == "mean" else self.total


class MetricCollector:
    """Collects the numbers, tensors and torchmetrics Metrics that a module logs, and averages them.

    Numbers are averaged over the steps, weighted by batch size (``reduce_fx`` sum, min and max over the steps of an
    epoch); a Metric is computed at the end of each epoch and reset, as under Lightning's Trainer. Epochs are then
    averaged, weighted by samples.

    Attributes:
        batch: The current batch.
        num_batches: Number of batches of the current epoch so far, including the current one.
    """

    def __init__(self) -> None:
        self.batch: Any = None
        self._batch_size: int | None = None
        self._epoch: dict[str, _Logged] = {}
        self._totals: dict[str, tuple[Any, float]] = {}
        self.num_samples = self.num_batches = 0

    def start_batch(self, batch: Any, batch_size: int, num_batches: int = 1) -> None:
        """Set the batch to which the next logged values belong; it may be the last of several of one size."""
        self.batch = batch
        self._batch_size = batch_size
        self.num_samples += batch_size * num_batches
        self.num_batches += num_batches

    def log(self, name: str, value: Any, *, reduce_fx: Any = "mean", batch_size: int | None = None) -> None:
        """Add one logged value.

        Raises:
            ConfigurationError: The reduction is not mean, sum, min or max, or a tensor has several elements.
        """
        logged = self._logged(name, reduce_fx)
        if isinstance(value, Metric):
            logged.metric = value
            return
        if isinstance(value, Tensor):
            value = self._checked(name, value)
        elif not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
            raise ConfigurationError(
                f"self.log('{name}'): got {value!r}, a {type(value).__name__}; log a number, a tensor or a Metric."
            )
        if batch_size is None:
            _warn_if_ambiguous(self.batch)
        weight = batch_size if batch_size is not None else self._batch_size
        logged.add(value, 1.0 if weight is None else weight)

    def log_all(self, name: str, values: Sequence[Any], *, reduce_fx: Any = "mean", batch_size: int) -> None:
        """Add what consecutive steps logged under one name, with the bits of one call of :meth:`log` for each.

        Args:
            name: Name of the values.
            values: A number for each step, all of one class and dtype.
            reduce_fx: The reduction.
            batch_size: Number of samples of each step's batch.
        """
        logged = self._logged(name, reduce_fx)
        if logged.can_add_all(values, batch_size):
            logged.add_all(values, batch_size)
            return
        for value in values:
            logged.add(value, batch_size)

    def _logged(self, name: str, reduce_fx: Any) -> _Logged:
        if name not in self._epoch:
            reduce = reduction(reduce_fx)
            if reduce not in ("mean", "sum", "min", "max"):
                raise ConfigurationError(f"self.log('{name}'): reduce_fx={reduce_fx!r}; use mean, sum, min or max.")
            self._epoch[name] = _Logged(reduce)
        return self._epoch[name]

    def _checked(self, name: str, value: Tensor) -> Tensor:
        if value.numel() != 1:
            raise ConfigurationError(f"self.log('{name}'): a tensor of shape {tuple(value.shape)}; log one number.")
        return value.detach().reshape(())

    def end_epoch(self) -> None:
        """End an epoch: compute its Metrics, and add its values to the means over epochs."""
        if not self._epoch:
            self.num_samples = self.num_batches = 0
            return
        for name, logged in self._epoch.items():
            if logged.metric is not None:
                if logged.metric.update_called:
                    logged.total, logged.weight = logged.metric.compute(), 1.0
                    logged.reduce = "last"
                logged.metric.reset()
            if logged.weight:
                total, weight = self._totals.get(name, (0.0, 0.0))
                samples = logged.weight if logged.reduce == "mean" else max(self.num_samples, 1)
                self._totals[name] = (total + logged.value() * samples, weight + samples)
        self._epoch = {}
        self.num_samples = self.num_batches = 0

    def current(self) -> dict[str, Tensor]:
        """Return the values so far, for schedulers and hooks that read ``callback_metrics``."""
        ended = {name: torch.as_tensor(total / weight) for name, (total, weight) in self._totals.items()}
        running = {n: torch.as_tensor(v.value()) for n, v in self._epoch.items() if v.metric is None and v.weight}
        return ended | running

    def means(self) -> dict[str, Any]:
        """Return the values by their names as they were logged; on a device they may not be computed yet."""
        self.end_epoch()
        return {name: total / weight for name, (total, weight) in self._totals.items()}

    def logged(self) -> dict[str, float]:
        """Return the values by their names as they were logged."""
        means = self.means()
        return dict(zip(means, read(means.values()), strict=True))

    def result(self) -> dict[str, float]:
        """Return the values by their names without the prefix of the stage, see :func:`plain_name`."""
        return {plain_name(name): value for name, value in self.logged().items()}


class ColumnCollector(MetricCollector):
    """Collects values of K clients at once, whose batches have one size: a value is one number, or has shape (K,).

    Args:
        num_clients: Number of clients, K.
    """

    def __init__(self, num_clients: int) -> None:
        super().__init__()
        self._num_clients = num_clients

    def _checked(self, name: str, value: Tensor) -> Tensor:
        return value.detach().expand(self._num_clients)

    def results(self) -> list[dict[str, float]]:
        """Return for each client what :meth:`result` gives."""
        self.end_epoch()
        found: list[dict[str, float]] = [{} for _ in range(self._num_clients)]
        for name, (total, weight) in self._totals.items():
            mean = total / weight
            values = mean.expand(self._num_clients).tolist() if isinstance(mean, Tensor) else [float(mean)] * len(found)
            for result, value in zip(found, values, strict=True):
                result[plain_name(name)] = value
        return found
