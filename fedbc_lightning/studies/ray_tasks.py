"""Does the runs of a study as tasks of Ray, on this machine or in a cluster."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedbc_lightning.core.errors import ConfigurationError, in_one_line, needs
from fedbc_lightning.distributed.ray_backend import address_of, connect
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import MAX_LOSSES, Run, State
from fedbc_lightning.studies.workers import SECONDS_TO_STOP, do_if_free


class RayTasks:
    """Tasks of Ray, each of which does one run; a run whose process or machine is lost is given to another task.

    Args:
        study: The study.
        since: Seconds since the epoch; a run that failed from then on is not tried again.

    Raises:
        ConfigurationError: Ray is not installed or cannot be reached, or knows no such resource.
    """

    def __init__(self, study: Study, since: float) -> None:
        self._study, self._since, self._tasks = study, since, dict[Path, Any]()  # folder of a run -> its task
        self._num_lost, self._lost = 0, ""
        with needs("backend: ray", "ray"):
            import ray
        self._ray: Any = ray
        self._options = {"num_cpus": study.threads, "max_retries": 0, **study.resources}
        with in_one_line("backend: ray: ", "; resources are those of a task of Ray, e.g. num_cpus, num_gpus, memory."):
            ray.remote(_do).options(**self._options)

    def __enter__(self) -> RayTasks:
        """Join the cluster or start one."""
        self._is_ours = connect(None, None, "backend")
        found = self._ray.cluster_resources()
        options = {"num_gpus": min(1, found.get("GPU", 0)), **self._options}
        for name, there in (("num_cpus", found.get("CPU", 0)), ("num_gpus", found.get("GPU", 0))):
            if options[name] > there and address_of(None) == "local":  # a cluster may grow
                raise ConfigurationError(
                    f"backend: ray: a run asks for {name}={options[name]}, and there are {there:g}."
                )
        self._start = self._ray.remote(_do).options(**options).remote
        return self

    def __exit__(self, *error: object) -> None:
        """Stop tasks after the round that they are in, as Ctrl-C does for a single run, and leave Ray."""
        for task in self._tasks.values():
            self._ray.cancel(task)
        if self._tasks:
            self._ray.wait([*self._tasks.values()], num_returns=len(self._tasks), timeout=SECONDS_TO_STOP)
        if self._is_ours:
            self._ray.shutdown()

    def advance(self, states: Sequence[State]) -> str | None:
        """Start tasks for runs that have none; return why there will be none, or None."""
        for folder, task in [*self._tasks.items()]:
            if self._ray.wait([task], timeout=0)[0]:
                del self._tasks[folder]
                try:
                    self._ray.get(task)
                except self._ray.exceptions.RayError as error:
                    self._num_lost += 1
                    self._lost = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        # Losses in a run are counted in its note; beyond these, tasks end before they begin one.
        if self._num_lost > MAX_LOSSES * len(states) + self._study.num_workers:
            return f"the tasks of Ray that do the runs are lost: {self._lost}"
        for state in states:
            if state.run.folder not in self._tasks and len(self._tasks) < (self._study.workers or len(states)):
                given = state.run, self._since, self._study.threads, Path.cwd(), sys.path
                self._tasks[state.run.folder] = self._start(*given)
        return None


def _do(run: Run, since: float, threads: int, place: Path, path: list[str]) -> None:
    """Do a run in a process of Ray, in the folder in which the study was started."""
    sys.path += [folder for folder in path if folder not in sys.path]
    os.chdir(place)
    torch.set_num_threads(threads)
    with contextlib.suppress(SystemExit):  # it was told to stop
        do_if_free(run, since)
