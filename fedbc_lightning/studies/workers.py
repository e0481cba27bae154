"""Does the runs of a study in processes of this machine.

A worker takes the next run that nobody has locked until none is left, so that the lock of a run ends with the process
that does it, however that ends. ``concurrent.futures`` breaks a whole pool when one process dies, and submitit's local
executor starts all jobs at once; both would lose runs that other workers can still do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from fedbc_lightning.core.errors import ConfigurationError, first_line, notes_of, one_line, report
from fedbc_lightning.core.printing import printing_to
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.studies.run_states import MAX_LOSSES, State, note_beginning, note_end, note_stop
from fedbc_lightning.studies.runs import StudyRuns
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

# Error of a run that was stopped from outside, which is no failure of the run.
STOPPED = "stopped"
# Seconds that busy workers have to write their checkpoint before they are killed.
SECONDS_TO_STOP = 20.0


class Workers:
    """Processes that do runs of a study; one that dies is replaced.

    Args:
        study: The study.
        count: Largest number of processes. With GPUs, process k is given GPU k modulo their number.
        since: Seconds since the epoch; a run that failed from then on is not tried again.
    """

    def __init__(self, study: Study, count: int, since: float) -> None:
        self._study, self._count, self._since = study, count, since
        self._processes: dict[int, BaseProcess] = {}
        self._num_deaths = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes: idle ones at once, busy ones after they have written their last finished round."""
        # SIGTERM ends an idle worker at once. In a run it stops after the round, as Ctrl-C does for a single run.
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + SECONDS_TO_STOP
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()

    def advance(self, states: Sequence[State]) -> str | None:
        """Start processes as long as there may be more of them; return why there will be none, or None."""
        for place in range(min(self._count, len(states))):
            process = self._processes.get(place)
            if process is not None and process.exitcode:
                self._num_deaths += 1
            if process is None or process.exitcode:
                self._processes[place] = self._start(place)
        # Deaths in a run are counted in its note; beyond these, workers die before they begin one.
        if self._num_deaths > MAX_LOSSES * len(states) + self._count:
            return "the processes that do the runs die as soon as they are started"
        is_over = all(process.exitcode == 0 for process in self._processes.values())
        return "no process is left that does it" if is_over else None

    def _start(self, place: int) -> BaseProcess:
        num_gpus = torch.cuda.device_count()
        device = place % num_gpus if num_gpus else None
        context = multiprocessing.get_context("spawn")  # CUDA and torch's threads do not survive a fork
        process = context.Process(target=work, args=(self._study, self._since, device), daemon=True)
        with _environment(OMP_NUM_THREADS=str(self._study.threads)):  # read when torch is imported
            process.start()
        return process


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables for the processes that are started inside the context."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def work(study: Study, since: float, device: int | None) -> None:
    """Do runs of a study until none is left.

    Args:
        study: The study.
        since: Seconds since the epoch; a run that failed from then on is not tried again.
        device: Index of the GPU that this process may use; None: the config decides.
    """
    # Ctrl-C goes to all processes of a terminal, and SLURM's signal before the time limit to all of a job; what is to
    # be done then is decided by the process that has started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]  # the job belongs to the study: no run shall share out its tasks, or requeue it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # device counts within these, if the user has set them
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    torch.set_num_threads(study.threads)
    with contextlib.suppress(ConfigurationError):  # whoever watches the study finds the same, and says it
        StudyRuns(study, Console(quiet=True), since).do(_ThisProcess(since))


def _end_with_parent() -> None:
    """End this process when its parent dies: a new command would otherwise wait for its runs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _ThisProcess:
    """Does, in this process, all runs that no other process does."""

    def __init__(self, since: float) -> None:
        self._since = since

    def advance(self, states: Sequence[State]) -> None:
        """Do the runs that are free."""
        for state in states:
            do_if_free(state.run, self._since)


def do_if_free(run: Run, since: float) -> None:
    """Do a run unless another process does it, or has done it.

    Args:
        run: The run.
        since: Seconds since the epoch; if the run has failed from then on, it is not tried again.

    Raises:
        SystemExit: This process was told to stop.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with RunLock() as lock:
        # The lock first, then the note: another process may have ended the run since this one looked.
        if not lock.try_take(run.folder):
            return
        state = State(run)
        state.look(since)
        if not state.is_open or not note_beginning(run, since):
            return
        started = time.perf_counter()
        error = _error_of(_words(run), run.folder / "log.txt")
        if error == STOPPED:
            note_stop(run)
            sys.exit(1)
        note_end(run, seconds=time.perf_counter() - started, error=error)


def _words(run: Run) -> list[str]:
    """Return the command line that begins a run or goes on with it."""
    # A resumed run is bit for bit the same as one that was never stopped, so a study may be killed at any time.
    if run_folder.last_checkpoint(run.folder) is not None:
        return [*run.words(), "--ckpt_path", "last"]
    for broken in run_folder.run_folders(run.folder):  # stopped before its first checkpoint: it starts again
        shutil.rmtree(broken)
    return run.words()


def _error_of(words: list[str], log_file: Path) -> str | None:
    """Do one run and return the error that ended it, or None.

    Args:
        words: Command line of ``fit``.
        log_file: File to which the output of the run is appended.
    """
    from fedbc_lightning.cli import FederatedCLI
    from fedbc_lightning.cli.command_arguments import PROG, UsageError
    from fedbc_lightning.distributed.interrupts import StoppedError

    with log_file.open("a", buffering=1, encoding="utf-8") as log, printing_to(log):
        print(f"$ {PROG} {' '.join(words)}")
        try:
            FederatedCLI(args=words, parser_kwargs={"prog": PROG})
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
