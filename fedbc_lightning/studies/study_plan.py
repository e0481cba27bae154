"""Estimates the cost of a study: each algorithm is measured once in each variant, with its first seed."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass
from typing import Any

import torch

from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.printing import each_line_once
from fedbc_lightning.planning import Plan
from fedbc_lightning.studies.compare import Comparison, parser_errors
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.notes import NOTE, has_ended, is_finished
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run, slug
from fedbc_lightning.studies.tuning import read_tuned, rungs


@dataclass
class PlannedMethod:
    """The estimated cost of one algorithm in one variant.

    Attributes:
        variant: Name of the variant.
        method: Name of the algorithm in the tables.
        plan: Estimate for one run that is reported.
        num_runs: Number of runs that are reported.
        num_trials: Number of runs for tuning.
        num_finished: Number of runs of both kinds that are finished already, and so cost nothing more.
        num_rounds: Number of rounds of all runs still to be done, tuning included.
    """

    variant: str
    method: str
    plan: Plan
    num_runs: int
    num_trials: int
    num_finished: int
    num_rounds: int

    @property
    def num_left(self) -> int:
        """Number of runs still to be done, tuning included."""
        return self.num_runs + self.num_trials - self.num_finished

    @property
    def share(self) -> float:
        """The work still to be done, as a number of full-length runs."""
        return self.num_rounds / self.plan.max_rounds

    @property
    def seconds(self) -> float:
        """Seconds that the runs still to be done take one after another."""
        return self.share * self.plan.training_seconds + self.num_left * self.plan.start_seconds

    @property
    def disk(self) -> int:
        """Bytes on disk that the runs still to be done leave behind."""
        kept = sum(size for what, size in self.plan.disk.items() if "while it is written" not in what)
        return self.num_left * kept

    @property
    def bytes_up(self) -> int:
        """Bytes that the clients send in the runs still to be done."""
        return round(self.share * self.plan.bytes_up)

    @property
    def bytes_down(self) -> int:
        """Bytes that the clients receive in the runs still to be done."""
        return round(self.share * self.plan.bytes_down)


@dataclass
class StudyPlan:
    """The estimated cost of a study; its times are as rough as those of :class:`~fedbc_lightning.planning.Plan`.

    Attributes:
        name: Name of the study.
        rows: Estimates for each variant and algorithm.
        num_workers: Number of worker processes.
    """

    name: str
    rows: list[PlannedMethod]
    num_workers: int

    @property
    def seconds(self) -> float:
        """Seconds on all workers: an even share of the work, but at least the longest run."""
        longest = max((row.plan.seconds for row in self.rows if row.num_rounds), default=0.0)
        return max(sum(row.seconds for row in self.rows) / self.num_workers, longest)

    @property
    def disk(self) -> int:
        """Bytes on disk that all runs still to be done leave behind."""
        return sum(row.disk for row in self.rows)

    @property
    def bytes_up(self) -> int:
        """Bytes that all clients send."""
        return sum(row.bytes_up for row in self.rows)

    @property
    def bytes_down(self) -> int:
        """Bytes that all clients receive."""
        return sum(row.bytes_down for row in self.rows)


class _Planned(FederatedCLI):
    """Runs a command line of ``plan`` and keeps its numbers instead of printing them."""

    def run_command(self, command: str) -> None:
        """Estimate the run, and keep when the objects were built."""
        built = time.perf_counter()
        plan = self.trainer.plan(**self.method_arguments(command))
        self.result = plan, built


def plan_study(study: Study) -> StudyPlan:
    """Estimate the cost of a study, measuring its runs one after another in this process.

    Args:
        study: The study to plan.

    Raises:
        ConfigurationError: The study cannot be run as configured; the message names the run.
    """
    Comparison(study).check()
    tuned = read_tuned(study)
    threads = torch.get_num_threads()
    torch.set_num_threads(study.threads)
    try:
        with each_line_once():
            rows = [
                _plan_method(study, variant, method, (tuned.get(variant) or {}).get(method.name))
                for variant in study.variants
                for method in study.methods
            ]
    finally:
        torch.set_num_threads(threads)
    return StudyPlan(str(study.name), rows, study.num_at_once)


def _plan_method(study: Study, variant: str, method: Method, chosen: dict[str, Any] | None) -> PlannedMethod:
    tried = chosen or method.first()
    runs = [study.run(variant, method, seed, tried) for seed in study.seed_list]
    is_chosen = not method.tuned or chosen is not None
    num_done = sum(is_finished(run) for run in runs) if is_chosen else 0
    plan = plan_run(runs[0])
    num_trials = num_tried = 0
    num_rounds = (len(runs) - num_done) * plan.max_rounds
    for rung, count in _count_trials(study, method):
        settings = study.trial(variant, method, study.tuning.seeds[0], tried, rung).settings
        places = study.folder / "tuning" / slug(variant) / slug(method.name)
        notes = places.glob(f"*/rung_{rung}/seed_*/{NOTE}")
        done = sum(has_ended(note.parent) for note in notes)
        num_trials, num_tried = num_trials + count, num_tried + min(count, done)
        num_rounds += (count - min(count, done)) * settings.get("trainer.max_rounds", plan.max_rounds)
    counts = len(runs), num_trials, num_done + num_tried, num_rounds
    return PlannedMethod(variant, method.name, plan, *counts)


def _count_trials(study: Study, method: Method) -> list[tuple[int, int]]:
    """Return pairs of a rung and its number of tuning runs, for one algorithm in one variant."""
    if not method.tuned:
        return []
    num_seeds = len(study.tuning.seeds)
    if any(values.grid is None for values in method.tuned.values()):
        return [(0, study.tuning.trials * num_seeds)]
    return [(rung, count * num_seeds) for rung, count in rungs(len(list(method.grid())), len(study.tuning.rungs))]


def plan_run(run: Run) -> Plan:
    """Return the estimated cost of one run in a process that has imported torch.

    Raises:
        ConfigurationError: The run cannot be done as configured; the message names it.
    """
    started = time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()), parser_errors(run):
            plan, built = _Planned(args=["plan", *run.words()[1:]], parser_kwargs={"prog": PROG}).result
            plan.start_seconds += built - started
            return plan
    except ConfigurationError as error:
        raise ConfigurationError(f"{run.variant} / {run.method}: {error}") from None
