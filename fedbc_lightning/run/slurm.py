"""Jobs that are started again, by SLURM or torchrun; those of SLURM that run out of time ask for it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.distributed.interrupts import SIGNALS, StoppedError
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.run import Progress

JOB = "FEDBC_JOB"
"""Environment variable with the name of a launch, for processes that this program has started."""

begun: set[Path] = set()
"""Run folders of this process; when it is started again, it goes on with those of the process before."""


def job_id() -> str | None:
    """Return the id that a job of SLURM keeps when it is started again; None outside of one."""
    if not SLURMEnvironment.detect():
        return None
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return os.environ.get("SLURM_JOB_ID") if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def starters(fabric: Fabric) -> dict[str, bool]:
    """Return the names of the jobs, agents and program that started the processes; True: perhaps not the first time.

    An agent of torchrun is known by its folder of logs, whose name is random. The id of a launch may be that of an
    earlier one, and counts of restarts do not tell: after a machine has joined, each agent has its own, and the new
    one has 0.
    """
    agent = re.search(r"([^\\/]+)[\\/]attempt_\d+", os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    mine = {
        job_id(): os.environ.get("SLURM_RESTART_COUNT", "0") != "0",
        os.environ.get(JOB): False,
        agent and "_".join(agent[1].split()): True,
    }
    found = [item for other in gather_objects(fabric, mine) for item in other.items()]
    return {name: again for name, again in found if name is not None}


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
    failed = f"'{shlex.join(command)}' failed ({how}); submit the job again, it goes on from here."
    rank_zero_info(
        f"SLURM: {failed if how else f'job {job} is in the queue again and will go on from its last round.'}"
    )
