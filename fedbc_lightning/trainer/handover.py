"""How the process that called ``fit`` gets what the processes that it forked or spawned have trained."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from fedbc_lightning.distributed.fabric import runs_elsewhere

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from fedbc_lightning.trainer.trainer import FederatedTrainer

ATTRIBUTES = (
    "server", "clients", "callback_metrics", "evaluation", "current_round", "finished_round", "log_dir", "should_stop",
    "result",
)  # fmt: skip
"""The attributes of the trainer of rank 0 that its parent's trainer takes over."""


@contextmanager
def handover(fabric: Fabric) -> Iterator[Path | None]:
    """Yield a path where rank 0 leaves its result for the caller; None where the caller is itself a process of the run.

    A file can be of any size. The launcher's own way back is a pipe that is read only after the processes have ended,
    and a process cannot end before what it wrote into a pipe is read: more than the pipe holds (64 KiB) never arrives.
    """
    if not runs_elsewhere(fabric):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fedbc_lightning_") as folder:
        yield Path(folder) / "result.pkl"


def leave(trainer: FederatedTrainer, path: Path) -> None:
    """Write what rank 0 has trained."""
    attributes = {name: getattr(trainer, name) for name in ATTRIBUTES}
    with path.open("wb") as file:
        pickle.dump((trainer.federation.module_state(), attributes), file)


def take_over(trainer: FederatedTrainer, model: LightningModule, path: Path) -> None:
    """Give the caller's trainer and model what rank 0 left; on a machine without rank 0 there is nothing."""
    if not path.exists():
        return
    with path.open("rb") as file:
        module_state, attributes = pickle.load(file)
    model.load_state_dict(module_state)
    for name, value in attributes.items():
        setattr(trainer, name, value)
