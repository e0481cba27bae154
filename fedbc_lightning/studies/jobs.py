"""Lets jobs of a cluster do the runs of a study, through submitit (https://github.com/facebookincubator/submitit)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.files import write_text
from fedbc_lightning.studies.run_states import State
from fedbc_lightning.studies.runs import StudyRuns
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.workers import Workers

if TYPE_CHECKING:
    import submitit
    from submitit.helpers import DelayedSubmission

# Folder in the study's folder for what submitit writes: scripts, outputs and results of the jobs.
FOLDER = "jobs"
# File in that folder with the numbers of the jobs submitted last.
RECORD = "jobs.json"
# Minutes that a job may take where ``resources`` gives no ``timeout_min``; it is requeued then.
TIMEOUT_MIN = 240
# Number of times that a job is requeued because its time was up.
MAX_TIMEOUTS = 1000


@dataclass
class Share:
    """What one job does: runs of a study that no other process does, until all are finished or have failed.

    Attributes:
        study: The study.
        since: Seconds since the epoch when the jobs were submitted; what failed from then on is not tried again.
    """

    study: Study
    since: float

    def __call__(self) -> None:
        """Do runs as long as there are some."""
        study = self.study
        with Workers(study, study.num_workers_of_a_job, self.since) as workers:
            StudyRuns(study, Console(), self.since).do(workers)

    def checkpoint(self) -> DelayedSubmission:
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
        try:
            import submitit
        except ModuleNotFoundError:
            raise ConfigurationError(
                f"backend: {study.backend} submits jobs by submitit: pip install 'fedbc-lightning[cluster]'"
            ) from None
        self._study, self._console, self._since = study, console, since
        self._folder = study.folder.resolve() / FOLDER
        self._submitit = submitit
        self._executor = self._configured()
        runs = [study.given, study.part, list(study.variants), [method.name for method in study.methods]]
        self._digest = sha256(json.dumps(runs, default=str).encode()).hexdigest()
        self._jobs: Sequence[submitit.Job[Any]] = []

    def __enter__(self) -> Jobs:
        """Submit the jobs, unless those of before are alive."""
        self._jobs = self._alive()
        verb = "at work" if self._jobs else "submitted"
        if not self._jobs:
            share = Share(self._study, self._since)
            try:
                with self._executor.batch():
                    self._jobs = [self._executor.submit(share) for _ in range(self._study.jobs)]
            except (OSError, self._submitit.core.utils.FailedJobError) as error:
                raise ConfigurationError(f"backend: the jobs cannot be submitted: {first_line(error)}") from error
            record = {"study": self._digest, "jobs": [job.job_id for job in self._jobs]}
            write_text(self._folder / RECORD, json.dumps(record))
        names = ", ".join(job.job_id for job in self._jobs)
        self._console.print(f"Jobs {verb}: {names}; they print to {self._folder}/", highlight=False, soft_wrap=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End processes of this machine and jobs without anything left to do; after Ctrl-C jobs of a cluster go on."""
        # Jobs of a cluster outlive this command on purpose: users close their laptops. The same command attaches again.
        if self._study.backend == "local" or kind is None:
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

    def _configured(self) -> submitit.AutoExecutor:
        study = self._study
        try:
            executor = self._submitit.AutoExecutor(
                self._folder, cluster=study.backend, slurm_max_num_timeout=MAX_TIMEOUTS
            )
        except RuntimeError as error:
            raise ConfigurationError(f"backend: {study.backend}: {first_line(error)}") from None
        try:
            executor.update_parameters(**{"name": f"fedbc-{study.name}", "timeout_min": TIMEOUT_MIN, **study.resources})
        except (NameError, TypeError, ValueError, AssertionError) as error:
            raise ConfigurationError(
                f"resources: {first_line(error).rstrip('.')}; they have submitit's names, e.g. timeout_min, "
                "gpus_per_node, cpus_per_task, mem_gb, slurm_partition."
            ) from None
        return executor

    def _alive(self) -> Sequence[submitit.Job[Any]]:
        """Return the jobs that were submitted before, if one of them waits or runs."""
        path = self._folder / RECORD
        if not path.is_file():
            return []
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["study"] != self._digest:  # these do other runs
            return []
        kind: type[submitit.Job[Any]] = (
            self._submitit.SlurmJob if self._study.backend == "slurm" else self._submitit.LocalJob
        )
        jobs = [kind(self._folder, name) for name in record["jobs"]]
        return [] if all(job.done() for job in jobs) else jobs
