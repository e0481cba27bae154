"""Collects the values that ``self.log`` logs inside a client or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torchmetrics import Metric

from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import overrides, own_base
from fedbc_lightning.core.metric_names import Metrics, are_names
from fedbc_lightning.core.private_lightning import forward_value, sizes_in

# NumPy's scalars have the bits of torch's operations on scalar tensors, which cost 3 us where these cost 1 us
NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
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


def by_plain_name(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a module has logged by :func:`plain_name`; a line names those of which one alone can be kept.

    Raises:
        ConfigurationError: No table can hold a name, or there are too many.
    """
    found = {plain_name(name): value for name, value in logged.items()}
    if not are_names(found):
        raise ConfigurationError(
            f"self.log: got names such as {max(found, key=len)[:40]!r}; give at most 10,000, each a text of at most "
            "1,000 characters without NUL and halves of pairs (surrogates)."
        )
    if len(found) < len(logged):
        names = [name for name in logged if [*map(plain_name, logged)].count(plain_name(name)) > 1]
        _cache.warn(
            f"model: {' and '.join(map(repr, names))} are logged, which are one metric, as a stage's prefix is left "
            "out; the last value alone is kept. Give each a word of its own."
        )
    return found


def reduction(reduce_fx: Any) -> str:
    """Return the name of a reduction that ``self.log`` was given as a name or a function.

    Example:
        >>> reduction("avg"), reduction(torch.mean), reduction(max)
        ('mean', 'mean', 'max')
    """
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "?")
    return "mean" if name == "avg" else name


def one_number(name: str, value: Any) -> Any:
    """Return what ``self.log`` was given under a name: a number, or a tensor without dimensions.

    Raises:
        ConfigurationError: It is no number, or a tensor with several elements.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigurationError(f"self.log('{name}'): a tensor of shape {tuple(value.shape)}; log one number.")
        return value.reshape(()) if value.ndim else value
    if not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
        raise ConfigurationError(
            f"self.log('{name}'): got {value!r}, a {type(value).__name__}; log a number, a tensor or a Metric."
        )
    return value


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


class WeightedMean:
    """Weighted mean of numbers or scalar tensors that are added one after another.

    Attributes:
        weight: Sum of the weights.
        last: The value that was added last.
    """

    def __init__(self) -> None:
        self._total: Any = 0.0
        self.weight: Any = 0.0
        self.last: Any = None

    def add(self, value: Any, weight: Any) -> None:
        """Add a value, which is a number or a tensor, with a weight."""
        self.weight += weight
        kind = NUMPY.get(value.dtype) if isinstance(value, Tensor) and value.is_cpu and not value.ndim else None
        # item() would cut a compiled step in two.
        if kind is None or isinstance(weight, Tensor) or is_dynamo_compiling():
            self.last = value.detach() if isinstance(value, Tensor) else value
            self._total = self._total + self.last * weight
            return
        total = kind(self._total) if type(self._total) is float else self._total
        self.last = last = kind(value.item())
        with np.errstate(all="ignore"):  # sums of infinities are as silent as torch's
            self._total = total + last * kind(weight)

    def add_all(self, values: Sequence[Any], weight: Any) -> None:
        """Add values of one class and dtype with equal weights, on a CPU with the bits of :meth:`add` for each."""
        first, rest = values[0], values[1:]
        if isinstance(first, Tensor) and not first.is_cpu:  # each operation costs a launch
            self._total = self._total + (torch.stack(tuple(values)) * weight).sum()
            self.weight, self.last = self.weight + weight * len(values), values[-1]
            return
        self.add(first, weight)
        if not rest or not isinstance(first, Tensor) or NUMPY.get(first.dtype) is not type(self._total):
            for value in rest:
                self.add(value, weight)
            return
        products = (torch.stack(tuple(rest)) * weight).numpy()
        with np.errstate(all="ignore"):  # accumulate rounds as a loop of additions does
            self._total = np.add.accumulate(np.append(self._total, products))[-1]
        self.weight += weight * len(rest)
        self.last = values[-1]

    def value(self) -> Any:
        """Return the mean: a tensor, which may not be computed yet, if a tensor was added; else a Python float."""
        if isinstance(self._total, (np.float32, np.float64)):
            return torch.from_numpy(np.asarray(self._total / type(self._total)(self.weight)))
        return self._total / self.weight


# How two values become one, by the name of a reduction other than the mean
COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda one, other: one + other,
    "max": lambda one, other: torch.maximum(torch.as_tensor(one), torch.as_tensor(other)),
    "min": lambda one, other: torch.minimum(torch.as_tensor(one), torch.as_tensor(other)),
}


class _Logged:
    """The values logged under one name in the current epoch.

    Args:
        reduce: Name of the reduction.
        on_step: Whether Lightning shows the value of a step.
        on_epoch: Whether it shows that of an epoch.
        kinds: Lightning's dictionaries in which it is shown.
    """

    def __init__(self, reduce: str, on_step: bool, on_epoch: bool, kinds: tuple[str, ...]) -> None:
        self.reduce, self.on_step, self.on_epoch, self.kinds = reduce, on_step, on_epoch, kinds
        self.metric: Metric | None = None
        # Of another reduction than the mean the weight alone counts: it says whether something was logged since the
        # epoch began. Of a Metric this is known when it was computed.
        self.mean = WeightedMean()
        self._result: Any = None  # of another reduction than the mean

    def add(self, value: Any, weight: float) -> None:
        """Add a value, which is a number or a scalar tensor."""
        if self.reduce == "mean":
            self.mean.add(value, weight)
            return
        if isinstance(value, Tensor):
            value = value.detach()
        self._result = COMBINED[self.reduce](self._result, value) if self.mean.weight else value
        self.mean.weight += weight
        self.mean.last = value

    def add_all(self, values: Sequence[Any], weight: float) -> None:
        """Add values of one class and dtype with equal weights, one after another."""
        if self.reduce == "mean":
            self.mean.add_all(values, weight)
            return
        for value in values:
            self.add(value, weight)

    def compute(self) -> None:
        """Compute the Metric, if there is one and it was not computed yet."""
        if self.metric is not None and self.reduce != "last" and self.metric.update_called:
            self.reduce, self._result, self.mean.weight = "last", self.metric.compute(), 1.0

    def value(self) -> Any:
        """Return the value of the epoch so far."""
        return self.mean.value() if self.reduce == "mean" else self._result

    def shown(self, *, in_batch: bool) -> Any:
        """Return what Lightning shows inside of a batch, or at the end of the epoch; None if it shows nothing new."""
        if in_batch:
            return self.mean.last if self.on_step else None
        if not self.on_epoch:
            return None
        if self.metric is not None and self.reduce != "last":
            return self.metric.compute() if self.metric.update_called else None
        return self.value() if self.mean.weight else None


class MetricCollector:
    """Collects the numbers, tensors and torchmetrics Metrics that a module logs, and averages them.

    Numbers are averaged over the steps, weighted by batch size (``reduce_fx`` sum, min and max over the steps of an
    epoch); a Metric is computed at the end of each epoch and reset, as under Lightning's Trainer. Epochs are then
    averaged, weighted by samples.

    Attributes:
        batch: The current batch.
        num_batches: Number of batches of the current epoch so far, including the current one.
        is_in_batch: Whether a batch is under way, so that Lightning would show values of steps.
        dataloader_idx: Number of the loader of the current batch; None unless an evaluation has several.
    """

    dataloader_idx: int | None = None

    def __init__(self) -> None:
        self.batch: Any = None
        self._batch_size: int | None = None
        self._epoch: dict[str, _Logged] = {}
        self._ended: dict[str, _Logged] = {}  # the last value of each name in the epochs that have ended
        self._totals: dict[str, WeightedMean] = {}
        self.num_samples = self.num_batches = 0
        self.is_in_batch = False

    def start_batch(self, batch: Any, batch_size: int, num_batches: int = 1) -> None:
        """Set the batch to which the next logged values belong; it may be the last of several of one size."""
        self.batch, self.is_in_batch = batch, True
        self._batch_size = batch_size
        self.num_samples += batch_size * num_batches
        self.num_batches += num_batches

    def start_loader(self, number: int | None) -> None:
        """Go on with an evaluation's next loader, or end with None; Metrics of the one before are not reset."""
        # As Lightning: a Metric that is logged for each of several loaders goes on counting.
        for logged in self._epoch.values():
            logged.compute()
        self.dataloader_idx, self.num_samples = number, 1  # the weight of a single epoch, by which no value is rounded

    def log(
        self, name: str, value: Any, *, reduce_fx: Any = "mean", batch_size: int | None = None, shown: tuple = ()
    ) -> None:
        """Add one logged value.

        Args:
            name: Name of the value.
            value: A number, a tensor or a Metric.
            reduce_fx: The reduction.
            batch_size: Weight of the value; None is the number of samples of the batch.
            shown: Where Lightning shows it: the arguments ``on_step``, ``on_epoch``, ``logger`` and ``prog_bar``.

        Raises:
            ConfigurationError: The reduction is not mean, sum, min or max, or a tensor has several elements.
        """
        logged = self._epoch.get(name) or self._logged(name, reduce_fx, *shown)
        if isinstance(value, Metric):
            logged.metric, logged.mean.last = value, forward_value(value)
            return
        value = self._checked(name, value)
        if batch_size is None:
            _warn_if_ambiguous(self.batch)
        weight = batch_size if batch_size is not None else self._batch_size
        logged.add(value, 1.0 if weight is None else weight)

    def log_all(self, name: str, values: Sequence[Any], *, reduce_fx: Any = "mean", batch_size: int) -> None:
        """Add what consecutive steps logged under one name, on a CPU with the bits of one call of :meth:`log` for each.

        Args:
            name: Name of the values.
            values: A number for each step, all of one class and dtype.
            reduce_fx: The reduction.
            batch_size: Number of samples of each step's batch.
        """
        self._logged(name, reduce_fx).add_all(values, batch_size)

    def _logged(
        self,
        name: str,
        reduce_fx: Any,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        logger: bool | None = None,
        prog_bar: bool = False,
    ) -> _Logged:
        if name not in self._epoch:
            reduce = reduction(reduce_fx)
            if reduce not in ("mean", *COMBINED):
                raise ConfigurationError(f"self.log('{name}'): reduce_fx={reduce_fx!r}; use mean, sum, min or max.")
            # Lightning's defaults: a step's value in hooks of batches, the epoch's in those of epochs.
            on_step = self.is_in_batch if on_step is None else on_step
            on_epoch = not self.is_in_batch if on_epoch is None else on_epoch
            kinds = ("callback", *["log"] * (logger is not False), *["pbar"] * prog_bar)
            self._epoch[name] = _Logged(reduce, on_step, on_epoch, kinds)
        return self._epoch[name]

    def _checked(self, name: str, value: Any) -> Any:
        return one_number(name, value)

    def end_epoch(self) -> None:
        """End an epoch: compute its Metrics, and add its values to the means over epochs."""
        if not self._epoch:
            self.num_samples = self.num_batches = 0
            return
        # As Lightning: a Metric is computed once per epoch, over all of its samples. Several epochs have no counterpart
        # in one value per round, so they are averaged by samples, and a broken-off epoch counts as much as it has.
        for name, logged in self._epoch.items():
            logged.compute()
            if logged.mean.weight:
                weight = logged.mean.weight if logged.reduce == "mean" else max(self.num_samples, 1)
                self._totals.setdefault(name, WeightedMean()).add(logged.value(), weight)
        for logged in self._epoch.values():
            if logged.metric is not None:
                logged.metric.reset()
                logged.metric = None
        self._ended, self._epoch = self._ended | self._epoch, {}
        self.num_samples = self.num_batches = 0

    def shown(self, kind: str) -> dict[str, Any]:
        """Return what Lightning shows now under its own names, such as ``loss_step`` and ``loss_epoch``.

        Args:
            kind: The dictionary that is meant: ``callback``, ``log`` (what loggers get) or ``pbar`` (numbers).
        """
        found: dict[str, Any] = {}
        # Inside of a batch the values of its step are the newest, and those of epochs come from the one before.
        running = (True,) if self.is_in_batch else (True, False)
        for by_name, times in ((self._ended, (True, False)), (self._epoch, running)):
            for in_batch in times:
                for name, logged in by_name.items():
                    value = logged.shown(in_batch=in_batch)
                    if value is None or kind not in logged.kinds:
                        continue
                    forked = f"{name}_{'step' if in_batch else 'epoch'}" if logged.on_step and logged.on_epoch else name
                    found |= dict.fromkeys((name, forked) if kind == "callback" else (forked,), torch.as_tensor(value))
        return {name: value.item() for name, value in found.items()} if kind == "pbar" else found

    def means(self) -> dict[str, Any]:
        """Return the values by their names as they were logged; on a device they may not be computed yet."""
        self.end_epoch()
        return {name: mean.value() for name, mean in self._totals.items()}

    def logged(self) -> Metrics:
        """Return the values by their names as they were logged."""
        means = self.means()
        return dict(zip(means, read(means.values()), strict=True))


class ColumnCollector(MetricCollector):
    """Collects values of K clients at once, whose batches have one size: a value is one number, or has shape (K,).

    Args:
        num_clients: Number of clients, K.
    """

    def __init__(self, num_clients: int) -> None:
        super().__init__()
        self._num_clients = num_clients

    def _checked(self, name: str, value: Any) -> Any:
        is_column = isinstance(value, Tensor)
        return value.detach().expand(self._num_clients) if is_column else one_number(name, value)

    def results(self) -> list[Metrics]:
        """Return for each client the values by their names without the prefix of the stage."""
        found: list[Metrics] = [{} for _ in range(self._num_clients)]
        for name, mean in by_plain_name(self.means()).items():
            values = mean.expand(self._num_clients).tolist() if isinstance(mean, Tensor) else [float(mean)] * len(found)
            for result, value in zip(found, values, strict=True):
                result[name] = value
        return found


class ModuleLog:
    """Passes what a module logs to the collector of the client or evaluation that runs.

    The module keeps the method :meth:`log` among its attributes. A copy of the module, by ``copy.deepcopy`` or pickle,
    must not copy the whole run with it: what a copy logs is dropped, as in Lightning.

    Args:
        collector: Returns the collector of the logged values; None drops them.

    Attributes:
        on_screen: Names that were logged with ``prog_bar=True``, in the order of their first calls.
    """

    def __init__(self, collector: Callable[[], MetricCollector] | None = None) -> None:
        self._collector = collector
        self.on_screen: dict[str, None] = {}

    def __reduce__(self) -> tuple[type[ModuleLog], tuple[()]]:
        """Return how to make a copy, which drops what it logs."""
        return type(self), ()

    def of(self, module: LightningModule) -> Callable[..., None]:
        """Return what a module gets as its ``log``; ``super().log`` in a method of its own leads here."""
        if not overrides(module, "log", LightningModule):
            return self.log
        base: Any = own_base(module, LightningModule)
        own = MethodType(type(module).log, module)

        def log(*args: Any, **kwargs: Any) -> None:
            # super() finds the class's method, whatever the module holds under this name.
            lightnings, base.log = base.log, lambda _, *args, **kwargs: self.log(*args, **kwargs)
            try:
                own(*args, **kwargs)
            finally:
                base.log = lightnings

        return log

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *,
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
        **ignored: Any,
    ) -> None:
        """Log one value, with Lightning's arguments; those without a meaning inside a client are ignored."""
        if isinstance(value, Mapping):
            raise ConfigurationError(f"self.log('{name}'): got a dict; use self.log_dict.")
        if prog_bar:
            self.on_screen[name] = None
        if self._collector is not None and (on_step is not False or on_epoch is not False):
            collector = self._collector()
            if add_dataloader_idx and collector.dataloader_idx is not None:
                name = f"{name}/dataloader_idx_{collector.dataloader_idx}"
            collector.log(
                name, value, reduce_fx=reduce_fx, batch_size=batch_size, shown=(on_step, on_epoch, logger, prog_bar)
            )  # fmt: skip
