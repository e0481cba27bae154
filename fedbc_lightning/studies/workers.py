"""Does all runs of a study, in processes of this machine or in jobs of a cluster: those that tune, then the reported.

A worker takes the next run that nobody has locked until none is left, so that the lock of a run ends with the process
that does it, however that ends. ``concurrent.futures`` breaks a whole pool when one process dies, and submitit's local
executor starts all jobs at once; both would lose runs that other workers can still do. A job of a cluster, submitted
through submitit (https://github.com/facebookincubator/submitit), is a command that starts such workers.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import torch

from fedbc_lightning.core.errors import (
    ConfigurationError,
    UsageError,
    first_line,
    in_one_line,
    needs,
    notes_of,
    one_line,
    report,
)
from fedbc_lightning.core.files import make_folder, open_file, read_mapping, refuse_link, remove, told, write
from fedbc_lightning.core.metric_names import measured
from fedbc_lightning.core.printing import Console, printing_to
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.lock import SECONDS_BETWEEN_LOOKS, RunLock
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_progress import StudyProgress
from fedbc_lightning.studies.study_run import MAX_LOSSES, Run, State, is_finished, note_beginning, note_end, write_note
from fedbc_lightning.studies.tuning import tune

# Error of a run that was stopped from outside, which is no failure of the run.
STOPPED = "stopped"
# Seconds that busy workers have to write their checkpoint before they are killed.
SECONDS_TO_STOP = 20.0
# Folder in the study's folder for what submitit writes: scripts, outputs and results of the jobs.
FOLDER = "jobs"
# File in that folder with the numbers of the jobs submitted last.
RECORD = "jobs.json"
# Minutes that a job may take where ``resources`` gives no ``timeout_min``; it is requeued then.
TIMEOUT_MIN = 240
# Number of times that a job is requeued because its time was up.
MAX_TIMEOUTS = 1000

# Lets some of these open runs be done; returns why none of them will be any more, or None.
Advance = Callable[[Sequence[State]], str | None]


class StudyRuns:
    """All runs of a study.

    Args:
        study: The study.
        console: Terminal on which progress is shown.
        since: Seconds since the epoch; a run that failed from then on, in any process, is not tried again.

    Attributes:
        states: States of the runs that are reported.
        trials: States of the runs that tune.
    """

    def __init__(self, study: Study, console: Console, since: float) -> None:
        self.study, self.console = study, console
        self.states: list[State] = []
        self.trials: list[State] = []
        self._since = since

    def do(self, advance: Advance) -> None:
        """Do all runs that are not finished, and wait for those that other processes do.

        Args:
            advance: Lets runs be done: by workers, by jobs of a cluster, or in this process.

        Raises:
            ConfigurationError: A folder holds another run, nothing was tuned, or a metric is not logged.
        """

        def tried(runs: Sequence[Run]) -> list[State]:
            states = self._do("tuning", runs, advance)
            self.trials += states
            return states

        # Every worker and every job goes through this method, tuning included: searches are deterministic, so all ask
        # for the same runs in the same order, and find the same best values without a word to each other.
        self.states = self._do(str(self.study.name), self.study.runs(tune(self.study, tried)), advance)

    def _do(self, title: str, runs: Sequence[Run], advance: Advance) -> list[State]:
        """Do runs under a progress bar, and return what has become of each."""
        states = [State(run, "finished" if is_finished(run) else "waiting") for run in runs]
        for state in states:
            state.look(self._since)
        with StudyProgress(title, self.console, states) as progress:
            while True:
                progress.show()
                self._check_metrics(states)
                left = [state for state in states if state.is_open]
                if not left:
                    return states
                reason = advance(left)
                for state in left:
                    state.look(self._since)
                    if reason is not None and state.is_open:
                        state.look(0.0)  # it may have failed in a job that was submitted before this command began
                        state.status, state.error = "failed", state.error or reason
                if any(state.is_open for state in left):
                    time.sleep(SECONDS_BETWEEN_LOOKS)

    def _check_metrics(self, states: Sequence[State]) -> None:
        """Check the names of metrics: what is evaluated is known from round 0 of the first run.

        Of which models, and what methods log in training, is known when each of them has done a round.

        Raises:
            ConfigurationError: No run logs one of the metrics.
        """
        logged = dict.fromkeys(name for state in states for name in state.logged)
        known = {(what.metric, what.split) for name in logged if (what := measured(name)) is not None}
        study, is_tuning = self.study, any(state.run.tried for state in states)
        if is_tuning:  # trials are not evaluated on test data
            known |= {(metric, "test") for metric, _ in known}
        are_all = logged and {s.run.method for s in states if s.round} >= {s.run.method for s in states if s.is_open}
        for metric in [study.tuning_metric, *study.metrics] if is_tuning else study.metrics:
            what, is_waited_for = measured(metric), is_tuning and metric != study.tuning_metric
            is_unknown = known and what is not None and (what.metric, what.split) not in known
            if metric not in logged and (is_unknown or (are_all and not is_waited_for)):
                there = [name for name in logged if "/" in name and not name.startswith(("time/", "comm/"))]
                raise ConfigurationError(f"metrics: no run logs '{metric}'; there is: {', '.join(there)}.")


class Workers:
    """Processes that do runs of a study; one that dies is replaced.

    Args:
        study: The study.
        since: Seconds since the epoch; a run that failed from then on is not tried again.
    """

    def __init__(self, study: Study, since: float) -> None:
        self._study, self._count, self._since = study, study.num_workers, since
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
            if process is None or process.exitcode:
                self._num_deaths += process is not None
                self._processes[place] = self._start(place)
        # Deaths in a run are counted in its note; beyond these, workers die before they begin one.
        if self._num_deaths > MAX_LOSSES * len(states) + self._count:
            return "the processes that do the runs die as soon as they are started"
        is_over = all(process.exitcode == 0 for process in self._processes.values())
        return "no process is left that does it; look whether its folder can be written" if is_over else None

    def _start(self, place: int) -> BaseProcess:
        # Process k is given GPU k modulo their number.
        device = place % num_gpus if (num_gpus := torch.cuda.device_count()) else None
        context = multiprocessing.get_context("spawn")  # CUDA and torch's threads do not survive a fork
        process = context.Process(target=work, args=(self._study, self._since, device), daemon=True)
        # Read when torch is imported, before the function is called.
        with mock.patch.dict(os.environ, OMP_NUM_THREADS=str(self._study.threads)):
            process.start()
        return process


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
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]  # the job belongs to the study: no run shall share out its tasks, or requeue it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # device counts within these, if the user has set them
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
    torch.set_num_threads(study.threads)

    def do_free_runs(states: Sequence[State]) -> str | None:
        errors = list[str]()
        for state in states:
            try:
                do_if_free(state.run, since)
            except ConfigurationError as error:  # its folder cannot be written: the others are done first
                errors.append(one_line(error))
        return errors[0] if len(errors) == len(states) else None

    with contextlib.suppress(ConfigurationError):  # whoever watches the study finds the same, and says it
        StudyRuns(study, Console(quiet=True), since).do(do_free_runs)


def _end_with_parent() -> None:
    """End this process when its parent dies: a new command would otherwise wait for its runs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def do_if_free(run: Run, since: float) -> None:
    """Do a run unless another process does it, or has done it.

    Args:
        run: The run.
        since: Seconds since the epoch; if the run has failed from then on, it is not tried again.

    Raises:
        ConfigurationError: Its folder, or the note in it, cannot be written.
        SystemExit: This process was told to stop.
    """
    with told(run.folder, setting="out"), RunLock() as lock:
        make_folder(run.folder)
        # The lock first, then the note: another process may have ended the run since this one looked.
        if lock.owner_after_trying(run.folder) is not None:
            return
        state = State(run)
        state.look(since)
        if not state.is_open or not note_beginning(run, since):
            return
        try:
            error = _error_of(_words(run), run.folder / "log.txt")
        except (ConfigurationError, OSError) as unwritable:
            error = one_line(unwritable)
        if error == STOPPED:
            write_note(run, is_finished=False)  # neither an end nor a loss: it waits to go on
            sys.exit(1)
        note_end(run, error)


def _words(run: Run) -> list[str]:
    """Return the command line that begins a run or goes on with it."""
    # A resumed run is bit for bit the same as one that was never stopped, so a study may be killed at any time.
    if run_folder.last_checkpoint(run.folder) is not None:
        return [*run.words(), "--ckpt_path", "last"]
    for broken in run_folder.run_folders(run.folder):  # stopped before its first checkpoint: it starts again
        remove(broken)
    return run.words()


def _error_of(words: list[str], log_file: Path) -> str | None:
    """Do one run and return the error that ended it, or None.

    Args:
        words: Command line of ``fit``.
        log_file: File to which the output of the run is appended.
    """
    from fedbc_lightning.cli.command_arguments import PROG
    from fedbc_lightning.cli.federated import FederatedCLI
    from fedbc_lightning.distributed.interrupts import StoppedError

    with open_file(log_file, "a", buffering=1) as log, printing_to(log):
        print(f"$ {PROG} {' '.join(words)}")
        try:
            # In a context of its own, since jsonargparse keeps the last parser in one, and with it all that it has made
            contextvars.copy_context().run(FederatedCLI, args=words, parser_kwargs={"prog": PROG})
        except (ConfigurationError, UsageError) as error:
            return one_line(error)
        except (KeyboardInterrupt, StoppedError):
            return STOPPED
        except SystemExit as error:  # raised by the parser, which has written the reason to the log
            return f"its command line is wrong; see {log_file}" if error.code else None
        except Exception as error:
            print(report(error), end="")
            return f"{type(error).__name__}: {first_line(error)}" + "".join(f" ({note})" for note in notes_of(error))
        finally:
            # Trainer, model and data refer to each other, and Python does not see how large they are: without this,
            # dozens of runs stay in memory.
            FederatedCLI.current = None
            gc.collect()
    return None


@dataclass
class Share:
    """What one job does: runs of a study that no other process does, until all are finished or have failed.

    Attributes:
        study: The study.
        since: Seconds since the epoch when the jobs were submitted; what failed from then on is not tried again.
        lock: Lock that the command holds as long as its jobs are to live; None: they outlive the command.
    """

    study: Study
    since: float
    lock: Path | None

    def __call__(self) -> None:
        """Do runs as long as there are some."""
        if self.lock is not None:
            # A command that a script has put into the background ignores SIGINT, and so would its jobs.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(target=self._end_with_command, args=(self.lock,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt), Workers(self.study, self.since) as workers:
            StudyRuns(self.study, Console(), self.since).do(workers.advance)

    @staticmethod
    def _end_with_command(lock: Path) -> None:
        filelock.FileLock(lock).acquire(poll_interval=SECONDS_BETWEEN_LOOKS)
        _thread.interrupt_main()

    def checkpoint(self) -> Any:
        """Return what submitit requeues when the job is preempted or its time is up; runs go on from ``last.ckpt``."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class Jobs:
    """The jobs of a study that run on a cluster. Those that were submitted before and are alive go on.

    Args:
        study: The study.
        console: Terminal on which the jobs are named.
        since: Seconds since the epoch; a run that failed from then on is not tried again.

    Raises:
        ConfigurationError: submitit is not installed, knows no such resource, or cannot submit.
    """

    def __init__(self, study: Study, console: Console, since: float) -> None:
        if not hasattr(signal, "pthread_sigmask"):
            raise ConfigurationError(
                f"backend: {study.backend}: Windows has no such jobs; without it processes of this machine do the runs."
            )
        self._study, self._console, self._since = study, console, since
        self._folder = study.folder.resolve() / FOLDER
        refuse_link(self._folder)
        self._asked = json.dumps([study.part, study.as_config()], default=str)
        self._lock = filelock.FileLock(self._folder / f"{os.getpid()}.lock")
        self._jobs: Sequence[Any] = []  # of submitit, which is an extra
        with needs(f"backend: {study.backend} submits jobs by submitit", "cluster"):
            import submitit
        advice = "resources have submitit's names, e.g. timeout_min, gpus_per_node, mem_gb, slurm_partition."
        with in_one_line(f"backend: {study.backend} (", f"); {advice}"):
            self._executor = submitit.AutoExecutor(self._folder, study.backend, slurm_max_num_timeout=MAX_TIMEOUTS)
            asked = {"name": f"fedbc-{study.name}", "timeout_min": TIMEOUT_MIN, **study.resources}
            self._executor.update_parameters(**asked)

    def __enter__(self) -> Jobs:
        """Submit the jobs, unless those of before are alive."""
        self._jobs = self._alive()
        verb = "at work" if self._jobs else "submitted"
        if not self._jobs:
            is_local = self._study.backend == "local"
            share = Share(self._study, self._since, Path(self._lock.acquire().lock.lock_file) if is_local else None)
            # Ctrl-C in a terminal would reach jobs of this machine, too, and submitit's process in front of each.
            posix: Any = signal
            before = posix.pthread_sigmask(posix.SIG_BLOCK, {signal.SIGINT})
            try:
                with in_one_line("backend: the jobs cannot be submitted: "), self._executor.batch():
                    self._jobs = [self._executor.submit(share) for _ in range(self._study.jobs)]
            finally:
                posix.pthread_sigmask(posix.SIG_SETMASK, before)
            record = {"study": self._asked, "jobs": [job.job_id for job in self._jobs]}
            write(self._folder / RECORD, json.dumps(record))
        names = ", ".join(job.job_id for job in self._jobs)
        self._console.print(f"Jobs {verb}: {names}; they print to {self._folder}/", highlight=False, soft_wrap=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End processes of this machine and jobs without anything left to do; after Ctrl-C jobs of a cluster go on."""
        # Jobs of a cluster outlive this command on purpose: users close their laptops. The same command attaches again.
        if self._study.backend == "local":
            self._lock.release()
            for job in self._jobs:
                job.wait()
        elif kind is None:
            for job in self._jobs:
                if not job.done():
                    job.cancel(check=False)
        elif kind is KeyboardInterrupt:
            names = " ".join(dict.fromkeys(job.job_id.partition("_")[0] for job in self._jobs))
            self._console.print(f"The jobs go on; `scancel {names}` stops them.", highlight=False, soft_wrap=True)

    def advance(self, states: Sequence[State]) -> str | None:
        """Return a sentence if all jobs have ended, else None: jobs take what is free by themselves."""
        if all(job.done() for job in self._jobs):
            return f"no job is left that does it; see the files in {self._folder}/"
        return None

    def _alive(self) -> Sequence[Any]:
        """Return the jobs that were submitted before, if one of them waits or runs."""
        import submitit

        record = read_mapping(self._folder / RECORD, {"jobs": list[str]})
        if record.get("study") != self._asked:  # these do other runs
            return []
        kind = submitit.SlurmJob if self._study.backend == "slurm" else submitit.LocalJob
        jobs: list[Any] = [kind(self._folder, name) for name in record["jobs"]]
        return [] if all(job.done() for job in jobs) else jobs
