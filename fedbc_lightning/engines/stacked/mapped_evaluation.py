"""Evaluates several clients by one mapped validation or test step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.engines.recorded.recording import NotRecordableError
from fedbc_lightning.engines.step_function import StepFunction
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.collector import ColumnCollector


class MappedEvaluation:
    """Runs the user's ``validation_step`` or ``test_step`` under ``vmap``, for clients of one batch each.

    The step must be a function of weights and batch, which the user promises by ``engine: vectorized``. Nevertheless
    the first evaluation is done in both ways and compared, see
    :class:`~fedbc_lightning.evaluation.clients_together.ClientsTogether`.

    Args:
        bench: The workbench.
        stage: ``"validation"`` or ``"test"``.
        most_rows: Largest number of models that are evaluated together.

    Attributes:
        most_models: Largest number of models that are evaluated together, if each client has its own.
        reasons: Map from a split to the reason why its clients are evaluated one after another, the same on all ranks,
            or to None if they are evaluated together. A split that is not in the map was not evaluated yet.
    """

    def __init__(self, bench: Workbench, stage: str, most_rows: int) -> None:
        self._bench, self._user, self._layout, self._row = bench, bench.user, bench.layout, bench.row
        self._stage = stage
        self._function = StepFunction(bench.user, bench.layout, f"{stage}_step")
        self.most_models = max(1, most_rows)
        self.reasons: dict[str, str | None] = {}

    def obstacle(self) -> str | None:
        """Return what in the module or a callback is called for each client, so that nothing can be mapped, or None."""
        user, stage = self._user, self._stage
        hooks = [name for name in (f"on_{stage}_batch_start", f"on_{stage}_batch_end") if user.hooks.listens(name)]
        of_module = (f"on_{stage}_epoch_start", f"on_{stage}_epoch_end")
        hooks += [name for name in of_module if overrides(user.module, name, LightningModule)]
        if hooks:
            return f"the hook {', '.join(hooks)} is called for each of them"
        return "the module holds a torchmetrics Metric" if user.metrics else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise if torch maps an operation of a step inside by running it once for each client.

        The module's own parameters are NaN meanwhile, so that a step that reaches them in another way than through its
        arguments gives NaN.

        Raises:
            NotRecordableError: torch warns of such an operation.
        """
        kept = self._row.clone()
        self._row.fill_(torch.nan)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
        finally:
            self._row.copy_(kept)
        if any("performance drop" in str(warning.message) for warning in caught):
            raise NotRecordableError("torch would do one of its operations for each of them in turn")

    def run(self, batch: list[Tensor], w: Tensor) -> list[dict[str, float]]:
        """Return what each client logged.

        Args:
            batch: The batches of K clients, (K, n, ...) each.
            w: The models of the clients, (K, d), or the one model of all, (d,).

        Raises:
            NotRecordableError: The step logs something else than numbers.
            Exception: Whatever the step raises when it is mapped.
        """
        self._user.start_collecting()  # puts scratch buffers back to what each client finds
        batch = self._user.to_device(batch)
        calls = self._function.evaluated(self._layout.views(w), batch, is_one_model=w.ndim == 1)
        collector = ColumnCollector(len(batch[0]))
        collector.start_batch(batch, batch[0].size(1))
        for call in calls:
            collector.log(call.name, call.value, reduce_fx=call.reduce_fx, batch_size=call.batch_size)
        return collector.results()

    def say(self, reason: str) -> None:
        """Log why clients are not evaluated together, each reason once."""
        step = f"{type(self._user.module).__name__}.{self._stage}_step"
        self._bench.say(f"{step}: clients are evaluated one after another: {reason.rstrip('.')}.")
