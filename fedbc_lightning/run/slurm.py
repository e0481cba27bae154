"""Jobs that are started again, by SLURM or torchrun; those of SLURM that run out of time ask for it."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.distributed.interrupts import SIGNALS, StoppedError
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.run import Progress

JOB = "FEDBC_JOB"
"""Environment variable with the name of a launch, for processes that this program has started."""


def job_id() -> str | None:
    """Return the id that a job of SLURM, torchrun or this program keeps when it is started again; None without one."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if not SLURMEnvironment.detect():
        # torchrun's own name for all runs without one; its agent stays when it starts their processes again
        return f"none-{os.getppid()}" if run == "none" else run or os.environ.get(JOB)
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return os.environ.get("SLURM_JOB_ID") if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def was_requeued() -> bool:
    """Return whether SLURM or torchrun starts this job again: it was asked to, was preempted, or lost a process."""
    counts = [os.environ.get(f"{name}_RESTART_COUNT", "0") for name in ("SLURM", "TORCHELASTIC")]
    return job_id() is not None and counts != ["0", "0"]


@contextmanager
def requeued(progress: Progress, *, is_first: bool) -> Iterator[None]:
    """Requeue the job if SIGUSR1 stopped the run; ``sbatch --signal=SIGUSR1@90`` sends it 90 s before the time limit.

    Args:
        progress: How far the run has come; it tells the run folder.
        is_first: Whether this is the process that asks SLURM.
    """
    try:
        yield
    except StoppedError as stop:
        last, job = Path(progress.log_dir or "") / run_folder.LAST, job_id()
        # Only now is the checkpoint complete: the recorder has written it while the exception passed through the loop.
        if stop.number == SIGNALS.get("SIGUSR1") and is_first and job is not None and last.is_file():
            _requeue(job)
        raise


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
