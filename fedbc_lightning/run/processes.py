"""Runs a verb of the trainer in all processes of a run, and brings its result back."""

from __future__ import annotations

import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

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
from fedbc_lightning.distributed.interrupts import StoppedError, passed_on
from fedbc_lightning.federation.checkpoint_content import module_state_of
from fedbc_lightning.run import slurm
from fedbc_lightning.run.folder import LAST, how_to_resume, run_folders
from fedbc_lightning.run.identity import read
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run import Outcome, Request, Run
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.run.trainer_attributes import RunView
from fedbc_lightning.state import checkpoint

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
    method, max_restarts = start_method(fabric.strategy), trainer.settings.max_restarts
    check_main_guard("trainer.strategy", method)
    if max_restarts and fabric.world_size > 1 and (method == "popen" or getattr(fabric.strategy, "num_nodes", 1) > 1):
        raise ConfigurationError(
            "trainer.max_restarts: only processes of one machine that strategy auto, ddp_spawn or ddp_fork starts can "
            "be started again; torchrun has --max-restarts of its own, and SLURM --requeue: the run goes on by itself."
        )
    if method == "popen":  # this process takes part in the run
        return launch(_run_in_process, trainer, request, perform, None), None
    # The result comes back in a file, which can have any size. The launcher's own way back is a pipe that is read after
    # the processes have ended, and a process cannot end before its pipe is read: more than 64 KiB would never arrive.
    with tempfile.TemporaryDirectory(prefix="fedbc_lightning_") as folder:
        file, restarts = Path(folder, "outcome.pkl"), Restarts(trainer.settings, request, Path(folder).name)
        while True:
            try:
                with passed_on(), mock.patch.dict(os.environ, {slurm.JOB: restarts.job}):
                    launch(_run_in_process, trainer, restarts.request, perform, file)
                break
            except KeyboardInterrupt:
                if restarts.last is not None:
                    trainer.progress.log_dir = str(restarts.last.parent.parent)
                raise
            except (ProcessRaisedException, ProcessExitedException) as error:
                restarts.take(_error_of(error, fabric.world_size, how_to_resume(restarts.last)))
        if not file.exists():  # rank 0 is on another machine
            return None, None
        with file.open("rb") as left:
            module_state, outcome = pickle.load(left)
    request.model.load_state_dict(module_state)
    return None, outcome


class Restarts:
    """Starts the processes of a run again that were lost; this process takes no part in the run.

    Args:
        settings: What the user chose.
        request: What the user asks for.
        job: Name of this launch, under which the processes write what they do.

    Attributes:
        request: What the processes are asked for next.
    """

    def __init__(self, settings: RunSettings, request: Request, job: str) -> None:
        self.request, self.job = request, job
        self._settings, self._number, self._round = settings, 0, -1

    @property
    def last(self) -> Path | None:
        """The ``last.ckpt`` that the processes have written, if any."""
        mine = [path for path in run_folders(self._settings.experiment) if self.job in (read(path) or ("", []))[1]]
        return next((path / LAST for path in reversed(mine) if (path / LAST).is_file()), None)

    def take(self, error: BaseException) -> None:
        """Ask for the rest of the run after an error.

        Raises:
            BaseException: The error, if no process was lost, too many were, or no further round was saved.
        """
        last, most = self.last, self._settings.max_restarts
        self._number += 1
        if not isinstance(error, LostProcessError) or self._number > most:
            raise error from None
        before, self._round = self._round, 0
        if last is not None:
            self._round = checkpoint.load(last)[checkpoint.KEY]["round"]
            self.request = self.request._replace(ckpt_path=last)
        if self._round <= before:
            raise error from None
        what = str(error).partition(". All others")[0]
        print(f"{what}; starts again from round {self._round} ({self._number} of {most})", file=sys.stderr, flush=True)


def _run_in_process(fabric: Fabric, trainer: RunView, request: Request, perform: Perform, file: Path | None) -> Any:
    """Perform what is asked in one of the processes; if there is a file, rank 0 writes the outcome to it."""
    progress, alike = trainer.progress, deterministic_algorithms(trainer.settings.deterministic)
    vars(rank_zero_only)["rank"] = fabric.global_rank  # a strategy for one process leaves that of the run before
    heartbeat: AbstractContextManager[None] = nullcontext()
    if fabric.world_size > 1:
        fits = request.fn == TrainerFn.FITTING  # only training can be resumed
        heartbeat = Heartbeat(fabric).held(lambda: how_to_resume(Path(progress.log_dir or "", LAST) if fits else None))
    requeued = slurm.requeued(progress, is_first=fabric.is_global_zero)
    with heartbeat, requeued, alike, quiet_event_writers(), RunLock() as lock:
        run, result = perform(request, lock)
    if file is not None and fabric.is_global_zero:
        federation, progress = run.federation, replace(run.progress, loggers=[])  # loggers cannot be pickled
        outcome = Outcome(federation.server, federation.clients, progress, result)
        with file.open("wb") as left:
            pickle.dump((module_state_of(federation), outcome), left)
    return result if file is None else None


def _error_of(error: ProcessExitedException | ProcessRaisedException, world_size: int, resume: str) -> BaseException:
    """Return the error to raise for a failed process: its own one if that has a message for the user."""
    if isinstance(error, ProcessExitedException):
        if error.exit_code > 128:  # told to end
            return StoppedError(error.exit_code - 128)
        who = f"process {error.error_index} of {world_size} (counted from 0)"
        return LostProcessError(f"{who} {WAS_LOST}. All others were stopped. {resume}")
    modules = ConfigurationError.__module__, LostProcessError.__module__  # also subclasses for what an engine cannot do
    found = re.search(rf"^({'|'.join(map(re.escape, modules))})\.\w+: (.*)", str(error), re.M | re.S)
    if found is None:
        return error
    message, *notes = found[2].strip().splitlines()
    again = (ConfigurationError if found[1] == modules[0] else LostProcessError)(message)
    for note in notes:
        add_note(again, note)
    return again
