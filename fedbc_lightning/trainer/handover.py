"""Hands the trained state from forked or spawned processes to the process that called ``fit``."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from fedbc_lightning.distributed.fabric import runs_elsewhere
from fedbc_lightning.federation.checkpoint_content import module_state_of

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from fedbc_lightning.trainer.trainer import FederatedTrainer

ATTRIBUTES = (
    "server", "clients", "callback_metrics", "evaluation", "current_round", "finished_round", "log_dir", "should_stop",
    "result",
)  # fmt: skip
"""Attributes that the caller's trainer takes over from the trainer of rank 0."""


@contextmanager
def handover(fabric: Fabric) -> Iterator[Path | None]:
    """Yield the path to which rank 0 writes its result for the caller; None if the caller itself trains.

    A file is used because it can have any size. The launcher's own way back is a pipe that is read after the processes
    have ended. A process cannot end before its pipe is read, so more than the pipe holds (64 KiB) would never arrive.
    """
    if not runs_elsewhere(fabric):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fedbc_lightning_") as folder:
        yield Path(folder) / "result.pkl"


def leave(trainer: FederatedTrainer, path: Path) -> None:
    """Write the state that rank 0 has trained."""
    attributes = {name: getattr(trainer, name) for name in ATTRIBUTES}
    with path.open("wb") as file:
        pickle.dump((module_state_of(trainer.federation), attributes), file)


def take_over(trainer: FederatedTrainer, model: LightningModule, path: Path) -> None:
    """Load the state that rank 0 has written into the caller's trainer and model; other machines have no such file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        module_state, attributes = pickle.load(file)
    model.load_state_dict(module_state)
    for name, value in attributes.items():
        setattr(trainer, name, value)
