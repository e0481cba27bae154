"""The attributes that Lightning callbacks expect of a trainer; to them a round is an epoch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor


class CallbackView:
    """Gives FederatedTrainer the attributes of ``lightning.Trainer`` that EarlyStopping, Timer and ModelSummary use."""

    _fabric: Fabric
    current_round: int
    max_rounds: int
    loggers: list[Any]
    callback_metrics: dict[str, Tensor]

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0."""
        return self._fabric.is_global_zero

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self._fabric.global_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._fabric.world_size

    @property
    def strategy(self) -> Any:
        """A stand-in for Lightning's strategy; EarlyStopping needs no reduction, because all ranks decide alike."""
        return SimpleNamespace(
            reduce_boolean_decision=lambda decision, all=True: decision,
            broadcast=lambda value, src=0: value,  # no exchange: ranks call callbacks at different times
            barrier=lambda name=None: None,
            root_device=self._fabric.device,
        )

    @property
    def current_epoch(self) -> int:
        """Number of the current round, which callbacks see as the epoch."""
        return self.current_round

    @property
    def global_step(self) -> int:
        """Number of the current round, which callbacks see as the step, too."""
        return self.current_round

    @property
    def max_epochs(self) -> int:
        """Number of rounds T, which callbacks see as the number of epochs."""
        return self.max_rounds

    @property
    def logger(self) -> Any:
        """First logger; None if there is none."""
        return self.loggers[0] if self.loggers else None

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Last metrics by name, the same as ``callback_metrics``."""
        return self.callback_metrics

    sanity_checking = False
    fast_dev_run = False
    val_check_interval = None  # makes EarlyStopping check after evaluations, not after local epochs
    check_val_every_n_epoch = 1
