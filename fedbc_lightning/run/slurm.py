"""Requeues SLURM jobs that are about to run out of time, and lets them resume from their checkpoint."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.distributed.interrupts import StoppedError
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.run import Progress


def job_id() -> str | None:
    """Return the job id that a job keeps when it is requeued; None outside of a SLURM batch job."""
    if not SLURMEnvironment.detect():
        return None
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return os.environ.get("SLURM_JOB_ID") if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def note_of(folder: Path) -> Path | None:
    """Return the file in an experiment's folder that names the checkpoint this job wrote before it was requeued."""
    job = job_id()
    return None if job is None else folder / f"requeued_{job}.txt"


def checkpoint_before(folder: Path) -> Path | None:
    """Return the checkpoint that this job wrote before it was requeued; None if it was not."""
    note = note_of(folder)
    return Path(note.read_text(encoding="utf-8").strip()) if note is not None and note.is_file() else None


@contextmanager
def requeued(experiment: Path, fn: TrainerFn, progress: Progress, *, is_writer: bool) -> Iterator[None]:
    """Requeue the job if SIGUSR1 stopped the run; ``sbatch --signal=SIGUSR1@90`` sends it 90 s before the time limit.

    A note in the experiment's folder names the checkpoint from which the requeued job resumes; a run that finishes
    removes the note.

    Args:
        experiment: Folder of all runs of this name.
        fn: The verb; only training runs have a note.
        progress: How far the run has come; it tells the run folder.
        is_writer: Whether this process writes the note.
    """
    note = note_of(experiment) if is_writer else None
    try:
        yield
    except StoppedError as stop:
        last = Path(progress.log_dir or "") / run_folder.LAST
        # Only now is the checkpoint complete: the recorder has written it while the exception passed through the loop.
        if stop.number == signal.SIGUSR1 and note is not None and last.is_file():
            note.write_text(f"{last.resolve()}\n", encoding="utf-8")
            _requeue(str(job_id()))
        raise
    if note is not None and fn == TrainerFn.FITTING:
        note.unlink(missing_ok=True)


def _requeue(job: str) -> None:
    # sbatch's own --requeue is for jobs that the system ends; one that ends by itself must ask for it.
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        how = "" if done.returncode == 0 else f"status {done.returncode}: {done.stderr.strip()}"
    except OSError as error:
        how = str(error)
    if how:
        rank_zero_info(f"SLURM: '{shlex.join(command)}' failed ({how}); submit the job again, it goes on from here.")
    else:
        rank_zero_info(f"SLURM: job {job} is in the queue again and will go on from its last round.")
