"""Several clients' evaluation by one mapped validation or test step."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric

from fedbc_lightning.collector import ColumnCollector
from fedbc_lightning.engines.cohort_batches import gathered_whole
from fedbc_lightning.engines.recording import NotRecordableError
from fedbc_lightning.engines.step_function import StepFunction
from fedbc_lightning.engines.step_state import Description
from fedbc_lightning.hooks import overrides
from fedbc_lightning.loading import ClientLoader

if TYPE_CHECKING:
    from fedbc_lightning.engines.vectorized import VectorizedEngine

log = logging.getLogger("lightning.pytorch." + __name__)


class MappedEvaluation:
    """The user's ``validation_step`` or ``test_step`` under ``vmap``, for clients of one batch each.

    The step is run as written, so it must be a function of weights and batch. Whether it is shows in the first
    evaluation, which is done both ways (see :class:`~fedbc_lightning.evaluation.Evaluator`).

    Args:
        engine: Its module is used.
        stage: ``"validation"`` or ``"test"``.

    Attributes:
        most_models: That are evaluated together, if each client has its own.
        reason: Why clients are evaluated one after another, the same on all ranks; None: they are not.
        settled: The splits of which that is known.
    """

    def __init__(self, engine: VectorizedEngine, stage: str) -> None:
        self._user, self._layout, self._stage = engine.user, engine.layout, stage
        self._row = engine.row
        self._function = StepFunction(engine.user, engine.layout, f"{stage}_step")
        self._description = Description([buffer for buffer, _ in engine.user.scratch], with_methods=True)
        self.most_models = max(1, engine.most_rows)
        self.reason: str | None = None
        self.settled: set[str] = set()

    def obstacle(self) -> str | None:
        """What of the module or a callback has a part in the evaluation of each client; None: nothing is known."""
        user, stage = self._user, self._stage
        hooks = [name for name in (f"on_{stage}_batch_start", f"on_{stage}_batch_end") if user.hooks.listens(name)]
        of_module = (f"on_{stage}_epoch_start", f"on_{stage}_epoch_end")
        hooks += [name for name in of_module if overrides(user.module, name, LightningModule)]
        if hooks:
            return f"the hook {', '.join(hooks)} is called for each of them"
        is_measuring = bool(user.metrics) or any(_holds_metric(vars(child)) for child in user.module.modules())
        return "the module holds a torchmetrics Metric" if is_measuring else None

    def described(self) -> Any:
        """What a step may change; equal where it has changed nothing.

        Raises:
            NotRecordableError: Something's changes could not be seen.
        """
        return self._description.of(self._user.module)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise if a mapped step inside prints, or if torch maps an operation by doing it once for each client.

        The module's own parameters are NaN meanwhile: a step that reaches them on another way gives other numbers.

        Raises:
            NotRecordableError: It does.
        """
        kept = self._row.clone()
        self._row.fill_(torch.nan)
        try:
            with warnings.catch_warnings(record=True) as caught, redirect_stdout(io.StringIO()) as printed:
                warnings.simplefilter("always")
                yield
        finally:
            self._row.copy_(kept)
        if printed.getvalue():
            raise NotRecordableError("it prints")
        if any("performance drop" in str(warning.message) for warning in caught):
            raise NotRecordableError("torch would do one of its operations for each of them in turn")

    def run(self, loaders: Sequence[ClientLoader | None], w: Tensor) -> list[dict[str, float]]:
        """What each client logged.

        Args:
            loaders: Of K clients with one batch each, of one size.
            w: Their models (K, d), or (d,) of all.

        Raises:
            NotRecordableError: The data are not of this form, or the step logs something else than numbers.
            Exception: What the step raises when it is mapped.
        """
        there = [loader for loader in loaders if loader is not None and len(loader) == 1]
        if len(there) < len(loaders) or len({loader.num_samples for loader in there}) > 1:
            raise NotRecordableError("their numbers of samples are not those that the data module tells")
        batch = gathered_whole(there)
        if batch is None:
            raise NotRecordableError("their data are not tensors in memory of one kind")
        batch = self._user.to_device(batch)
        parameters = [w[..., e.offset : e.end].view(*w.shape[:-1], *e.shape) for e in self._layout.entries]
        calls = self._function.evaluated(parameters, batch, is_one_model=w.ndim == 1)
        collector = ColumnCollector(len(there))
        collector.start_batch(batch, batch[0].size(1))
        for call in calls:
            collector.log(call.name, call.value, reduce_fx=call.reduce_fx, batch_size=call.batch_size)
        return collector.results()

    def stop(self, reason: str) -> None:
        """Evaluate one after another from now on, and say so."""
        self.reason = reason.rstrip(".")
        name = type(self._user.module).__name__
        say = rank_zero_only(log.info)
        say(f"{name}.{self._stage}_step: clients are evaluated one after another: {self.reason}.")


def _holds_metric(value: Any) -> bool:
    """Whether a Metric stands in attributes or containers of them, where torch does not register it."""
    if isinstance(value, dict):
        return any(map(_holds_metric, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_metric, value))
    return isinstance(value, Metric) or (isinstance(value, nn.Module) and any(map(_is_metric, value.modules())))


def _is_metric(module: nn.Module) -> bool:
    return isinstance(module, Metric)
