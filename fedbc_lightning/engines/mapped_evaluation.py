"""Several clients' evaluation by one mapped validation or test step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule
from torch import Tensor

from fedbc_lightning.collector import ColumnCollector
from fedbc_lightning.engines.cohort_batches import gathered_whole
from fedbc_lightning.engines.step_function import StepFunction
from fedbc_lightning.engines.step_recorder import StepRecorder
from fedbc_lightning.errors import first_line
from fedbc_lightning.hooks import overrides
from fedbc_lightning.loading import ClientLoader

if TYPE_CHECKING:
    from fedbc_lightning.engines.vectorized import VectorizedEngine
    from fedbc_lightning.module import UserModule

log = logging.getLogger("lightning.pytorch." + __name__)


class MappedEvaluation:
    """The user's ``validation_step`` or ``test_step`` under ``vmap``, for clients of one batch each.

    The step is run as written, so it must be a function of weights and batch; where it is not, or cannot be mapped, the
    clients are evaluated one after another, and a line says why. For each shape that is new, one client's numbers are
    compared with those that it has by itself.

    Args:
        engine: Its module is used.
        stage: ``"validation"`` or ``"test"``.

    Attributes:
        most_models: That are evaluated together, if each client has its own.
        reason: Why clients are evaluated one after another from now on; None: they are not.
    """

    def __init__(self, engine: VectorizedEngine, stage: str) -> None:
        user = engine.user
        self._engine, self._user, self._stage = engine, user, stage
        self._function = StepFunction(user, engine.layout, f"{stage}_step")
        self._watched = StepRecorder(user, engine.layout).watched
        self._compared: set[tuple] = set()
        self.most_models = max(1, engine.most_rows)
        self.reason: str | None = None

    def run(self, loaders: Sequence[ClientLoader], w: Tensor) -> list[dict[str, float]] | None:
        """What each client logged; None: they are to be evaluated one after another.

        Args:
            loaders: Of K clients with one batch each, of one size.
            w: Their models (K, d), or (d,) of all.
        """
        batch = None if self.reason is not None else gathered_whole(loaders)
        if batch is None:
            return None
        shape = (w.ndim, *[(part.shape[1:], part.dtype) for part in batch])
        try:
            if shape in self._compared:
                return self._mapped(batch, w)
            alone = [self._alone(loaders[k], w if w.ndim == 1 else w[k]) for k in (0, -1)]
            with self._watched():
                found = self._mapped(batch, w)
        except Exception as error:  # whatever it is, by itself each client gives the same error, or none
            self._stop(first_line(error))
            return None
        if not any(map(_is_close, alone, (found[0], found[-1]))):  # one may be off where two logits are equal
            self._stop("mapped over clients, it gives other numbers")
            return None
        self._compared.add(shape)
        return found

    def _mapped(self, batch: list[Tensor], w: Tensor) -> list[dict[str, float]]:
        user, num_clients = self._user, len(batch[0])
        batch = user.to_device(batch)
        parameters = [w[..., e.offset : e.end].view(*w.shape[:-1], *e.shape) for e in self._engine.layout.entries]
        calls = self._function.evaluated(parameters, batch, is_one_model=w.ndim == 1)
        collector = ColumnCollector(num_clients)
        collector.start_batch(batch, batch[0].size(1))
        for call in calls:
            collector.log(call.name, call.value, reduce_fx=call.reduce_fx, batch_size=call.batch_size)
        return collector.results()

    def _alone(self, loader: ClientLoader, w: Tensor) -> dict[str, float]:
        self._engine.row.copy_(w)
        return self._user.evaluate(loader, self._stage)

    def _stop(self, reason: str) -> None:
        self.reason = reason
        say_why_not(self._user, self._stage, reason)


def find_obstacle(user: UserModule, stage: str) -> str | None:
    """What of the module or a callback has a part in the evaluation of each client, so that none may be left out."""
    hooks = [name for name in (f"on_{stage}_batch_start", f"on_{stage}_batch_end") if user.hooks.listens(name)]
    of_module = (f"on_{stage}_epoch_start", f"on_{stage}_epoch_end")
    hooks += [name for name in of_module if overrides(user.module, name, LightningModule)]
    if hooks:
        return f"the hook {', '.join(hooks)} is called for each of them"
    return "the module holds a torchmetrics Metric" if user.metrics else None


def say_why_not(user: UserModule, stage: str, reason: str) -> None:
    """Tell that clients are not evaluated together."""
    name = type(user.module).__name__
    log.info(f"{name}.{stage}_step: clients are evaluated one after another: {reason}.")


def _is_close(a: dict[str, float], b: dict[str, float]) -> bool:
    def is_close(x: float, y: float) -> bool:
        return math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-5) or (math.isnan(x) and math.isnan(y))

    return a.keys() == b.keys() and all(is_close(a[name], b[name]) for name in a)
