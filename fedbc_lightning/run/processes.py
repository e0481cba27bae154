"""Runs a verb of the trainer in all processes of a run, and brings its result back."""

from __future__ import annotations

import pickle
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.utilities import rank_zero_only
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from fedbc_lightning.core.devices import deterministic_algorithms
from fedbc_lightning.core.errors import ConfigurationError, add_note
from fedbc_lightning.core.files import quiet_event_writers
from fedbc_lightning.core.main_guard import check_main_guard
from fedbc_lightning.core.private_lightning import start_method
from fedbc_lightning.distributed.heartbeat import WAS_LOST, Heartbeat, LostProcessError
from fedbc_lightning.distributed.interrupts import passed_on
from fedbc_lightning.federation.checkpoint_content import module_state_of
from fedbc_lightning.run import slurm
from fedbc_lightning.run.folder import LAST, how_to_resume, last_checkpoint
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run import Outcome, Request, Run
from fedbc_lightning.run.trainer_attributes import RunView

Perform = Callable[[Request, RunLock], tuple[Run, Any]]
"""Function that does in one process what is asked, and returns the run that it has set up, and the result."""


def run_in_processes(
    trainer: RunView, fabric: Fabric, request: Request, perform: Perform
) -> tuple[Any, Outcome | None]:
    """Start the processes, and let each of them perform what is asked.

    Args:
        trainer: Trainer of the run.
        fabric: Fabric of the trainer, which starts the processes.
        request: What the user asks for.
        perform: Function that each process calls.

    Returns:
        The result in a process that takes part in the run, and the outcome in a process that only started the others;
        the other one of the two is None.

    Raises:
        ConfigurationError: A setting cannot be honoured.
        LostProcessError: A process was killed.
    """
    launch: Any = fabric.launch
    check_main_guard("trainer.strategy", start_method(fabric.strategy))
    if start_method(fabric.strategy) == "popen":  # this process takes part in the run
        return launch(_run_in_process, trainer, request, perform, None), None
    # The result comes back in a file, which can have any size. The launcher's own way back is a pipe that is read after
    # the processes have ended, and a process cannot end before its pipe is read: more than 64 KiB would never arrive.
    with tempfile.TemporaryDirectory(prefix="fedbc_lightning_") as folder:
        file = Path(folder, "outcome.pkl")
        try:
            with passed_on():
                launch(_run_in_process, trainer, request, perform, file)
        except KeyboardInterrupt:
            # This process has only started the others, and does not know the folder to which they wrote.
            last = last_checkpoint(trainer.settings.experiment)
            if last is not None and request.fn == TrainerFn.FITTING:
                trainer.progress.log_dir = str(last.parent.parent)
            raise
        except (ProcessRaisedException, ProcessExitedException) as error:
            # This process has only started the others: the folder that it knows is that of a run before, if any.
            raise _error_of(error, fabric.world_size, _how_to_resume(trainer, request, log_dir=None)) from None
        if not file.exists():  # rank 0 is on another machine
            return None, None
        with file.open("rb") as left:
            module_state, outcome = pickle.load(left)
    request.model.load_state_dict(module_state)
    return None, outcome


def _run_in_process(fabric: Fabric, trainer: RunView, request: Request, perform: Perform, file: Path | None) -> Any:
    """Perform what is asked in one of the processes; if there is a file, rank 0 writes the outcome to it."""
    progress, alike = trainer.progress, deterministic_algorithms(trainer.settings.deterministic)
    vars(rank_zero_only)["rank"] = fabric.global_rank  # a strategy for one process leaves that of the run before
    heartbeat: AbstractContextManager[None] = nullcontext()
    if fabric.world_size > 1:
        heartbeat = Heartbeat(fabric).held(lambda: _how_to_resume(trainer, request, progress.log_dir))
    requeued = slurm.requeued(progress, is_first=fabric.is_global_zero)
    with heartbeat, requeued, alike, quiet_event_writers(), RunLock() as lock:
        run, result = perform(request, lock)
    if file is None:
        return result
    if fabric.is_global_zero:
        federation, progress = run.federation, replace(run.progress, loggers=[])  # loggers cannot be pickled
        outcome = Outcome(federation.server, federation.clients, progress, result)
        with file.open("wb") as left:
            pickle.dump((module_state_of(federation), outcome), left)
    return None


def _how_to_resume(trainer: RunView, request: Request, log_dir: str | None) -> str:
    if request.fn != TrainerFn.FITTING:  # only training can be resumed
        return how_to_resume(None)
    return how_to_resume(last_checkpoint(trainer.settings.experiment) if log_dir is None else Path(log_dir, LAST))


def _error_of(error: ProcessExitedException | ProcessRaisedException, world_size: int, resume: str) -> Exception:
    """Return the error to raise for a failed process: its own one if that has a message for the user."""
    if isinstance(error, ProcessExitedException):
        who = f"process {error.error_index} of {world_size} (counted from 0)"
        return LostProcessError(f"{who} {WAS_LOST} {resume}")
    module = re.escape(ConfigurationError.__module__)  # also of its subclasses for what an engine cannot do
    found = re.search(rf"^{module}\.\w+: (.*)", str(error), re.M | re.S)
    if found is None:
        return error
    message, *notes = found[1].strip().splitlines()
    again = ConfigurationError(message)
    for note in notes:
        add_note(again, note)
    return again
