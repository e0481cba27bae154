"""What the callbacks of this package ask of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.run.recorder import Recorder
from fedbc_lightning.state.declaration import ServerState
from fedbc_lightning.state.layout import ParameterLayout


class WatchedRun(Protocol):
    """The trainer as these callbacks see it; a callback of the user's may ask it for more.

    Lightning declares its own Trainer in the hooks of callbacks. Ours get this, and so need ``type: ignore[override]``.

    Attributes:
        current_round: The round that is under way.
        max_rounds: T.
        should_stop: Whether the run ends before round T.
        seed: The seed of all that is random.
        callback_metrics: What has been logged, by name.
        datamodule: The clients' data.
        federation: What is trained.
        layout: Where each parameter lies in a row of weights.
        server: The server's state.
        recorder: Writes tables and checkpoints.
        enable_checkpointing: Whether checkpoints are written.
        default_root_dir: The folder of all runs.
        log_dir: The folder of this run; None before it is made.
        loggers: Lightning's loggers.
    """

    current_round: int
    max_rounds: int
    should_stop: bool
    seed: int
    callback_metrics: dict[str, Tensor]
    datamodule: FederatedDataModule
    federation: Federation
    layout: ParameterLayout
    server: ServerState
    recorder: Recorder
    enable_checkpointing: bool
    default_root_dir: Path
    log_dir: str | None
    loggers: list[Any]

    @property
    def is_global_zero(self) -> bool:
        """Whether this is process 0."""

    @property
    def world_size(self) -> int:
        """The number of processes."""
