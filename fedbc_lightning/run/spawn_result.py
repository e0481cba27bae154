"""Hands the trained state from forked or spawned processes to the process that called ``fit``."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule

from fedbc_lightning.core.private_lightning import start_method
from fedbc_lightning.federation.checkpoint_content import module_state_of
from fedbc_lightning.run.run import Progress, Run
from fedbc_lightning.state.declaration import ClientStore, ServerState

if TYPE_CHECKING:
    from lightning.fabric import Fabric


@dataclass
class Outcome:
    """What a run in other processes leaves to the process that called the trainer.

    Attributes:
        server: State of the server.
        clients: State of the clients.
        progress: How far the run has come, without its loggers.
        result: Value that the verb returns.
    """

    server: ServerState
    clients: ClientStore
    progress: Progress
    result: Any


@contextmanager
def result_file(fabric: Fabric) -> Iterator[Path | None]:
    """Yield the path to which rank 0 writes its outcome for the caller; None if the caller itself trains.

    A file is used because it can have any size. The launcher's own way back is a pipe that is read after the processes
    have ended. A process cannot end before its pipe is read, so more than the pipe holds (64 KiB) would never arrive.
    """
    if start_method(fabric.strategy) == "popen":  # this process takes part in the run
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fedbc_lightning_") as folder:
        yield Path(folder) / "outcome.pkl"


def leave(run: Run, result: Any, path: Path) -> None:
    """Write the outcome of a run on rank 0, and the state of the user's module with z in it."""
    federation = run.federation
    outcome = Outcome(federation.server, federation.clients, run.progress.without_loggers(), result)
    with path.open("wb") as file:
        pickle.dump((module_state_of(federation), outcome), file)


def take_over(model: LightningModule, path: Path) -> Outcome | None:
    """Load the state of rank 0 into the caller's model, and return the outcome; None on other machines."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        module_state, outcome = pickle.load(file)
    model.load_state_dict(module_state)
    return outcome
