"""The worker process: does runs of a study, one after another, and reports their progress.

It locks the folder of the run that it does, so that the lock ends with the process, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.printing import printing_to
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.studies.notes import failure, is_finished, write_note
from fedbc_lightning.studies.study_run import Run

if TYPE_CHECKING:
    from fedbc_lightning.trainer.trainer import FederatedTrainer


STOPPED = "stopped"
"""Error of a run that was stopped from outside, which is no failure of the run."""


@dataclass(frozen=True)
class Task:
    """A run that a worker is to do.

    Attributes:
        run: The run.
        since: Seconds since the epoch; if the run has failed from then on in another process, it is not tried again.
    """

    run: Run
    since: float


@dataclass(frozen=True)
class Progress:
    """Report of a worker that a round has finished.

    Attributes:
        round: Number of the finished round, from 1.
        max_rounds: T, the number of rounds of the run.
    """

    round: int
    max_rounds: int


@dataclass(frozen=True)
class Ended:
    """Report of a worker that a run has ended.

    Attributes:
        error: Reason why the run failed, in one sentence; None if it finished.
        seconds: Seconds that the run took.
    """

    error: str | None
    seconds: float


@dataclass(frozen=True)
class Elsewhere:
    """Report of a worker that another process does the run."""


def work(tasks: Connection, threads: int, device: int | None) -> None:
    """Do the tasks that come from the connection until it closes, and send reports into it.

    Args:
        tasks: Connection to the scheduling process.
        threads: Number of torch threads.
        device: Index of the GPU that this worker may use; None: the config decides.
    """
    # Ctrl-C goes to all processes of a terminal, and SLURM's signal before the time limit to all of a job; what is to
    # be done then is decided by the scheduling process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]  # the job belongs to the study: no run shall share out its tasks, or requeue it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # device counts within these, if the user has set them
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            task: Task = tasks.recv()
        except (EOFError, OSError):
            return
        _run(task, tasks)


def _end_with_parent() -> None:
    """End this process when its parent dies: a new scheduler would otherwise run its runs a second time."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run(task: Task, connection: Connection) -> None:
    """Do one run unless another process does it or has done it, and report its end."""
    run, started = task.run, time.perf_counter()
    run.folder.mkdir(parents=True, exist_ok=True)
    report: Ended | Elsewhere
    with RunLock() as lock:
        if not lock.try_take(run.folder):
            report = Elsewhere()
        else:
            report = Ended(_error_of_locked(task, connection), time.perf_counter() - started)
    with suppress(OSError):  # the scheduler is gone, or is stopping this process
        connection.send(report)


def _error_of_locked(task: Task, connection: Connection) -> str | None:
    """Do a run whose folder is locked unless it has ended since the scheduler looked, and return why it failed."""
    run = task.run
    try:
        error = failure(run, task.since)
        if error is not None or is_finished(run):
            return error
    except ConfigurationError as problem:  # the folder has become that of another run
        return str(problem)
    error = _error_of(_words(run), run.folder / "log.txt", connection)
    if error != STOPPED:
        write_note(run, is_finished=error is None, error=error)
    return error


def _words(run: Run) -> list[str]:
    """Prepare a run's folder, and return the command line that begins the run or goes on with it."""
    write_note(run, is_finished=False)
    if run_folder.last_checkpoint(run.folder) is not None:
        return [*run.words(), "--ckpt_path", "last"]
    for broken in run_folder.run_folders(run.folder):  # stopped before its first checkpoint: it starts again
        shutil.rmtree(broken)
    return run.words()


def _error_of(words: list[str], log_file: Path, connection: Connection) -> str | None:
    """Do one run and return the error that ended it, or None.

    Args:
        words: Command line of ``fit``.
        log_file: File to which the output of the run is appended.
        connection: Connection to the scheduling process.
    """
    from lightning.pytorch import Callback, LightningModule

    from fedbc_lightning.cli import FederatedCLI
    from fedbc_lightning.cli.command_arguments import PROG, UsageError
    from fedbc_lightning.core.tracebacks import notes_of, one_line, report
    from fedbc_lightning.distributed.interrupts import StoppedError

    class Reporter(Callback):
        """Reports every finished round to the scheduler."""

        def on_round_end(self, trainer: FederatedTrainer, pl_module: LightningModule) -> None:
            with suppress(OSError):
                connection.send(Progress(trainer.current_round, trainer.max_rounds))

    with log_file.open("a", buffering=1, encoding="utf-8") as log, printing_to(log):
        print(f"$ {PROG} {' '.join(words)}")
        try:
            options: dict[str, Any] = {"trainer_defaults": {"callbacks": [Reporter()]}}
            FederatedCLI(args=words, parser_kwargs={"prog": PROG}, **options)
        except (ConfigurationError, UsageError) as error:
            return one_line(error)
        except (KeyboardInterrupt, StoppedError):
            return STOPPED
        except SystemExit as error:  # raised by the parser, which has written the reason to the log
            return None if not error.code else _last_line(log_file)
        except Exception as error:
            print(report(error), end="")
            return f"{type(error).__name__}: {first_line(error)}" + "".join(f" ({note})" for note in notes_of(error))
    return None


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").strip().splitlines()
    return lines[-1].removeprefix("fedbc-cli: error: ") if lines else "no reason given"
