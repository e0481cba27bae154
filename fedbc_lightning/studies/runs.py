"""Does all runs of a study: first those that tune, then those that are reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from rich.console import Console

from fedbc_lightning.studies.results import check_metrics, finished
from fedbc_lightning.studies.run_states import State, is_finished
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_progress import StudyProgress
from fedbc_lightning.studies.study_run import Run
from fedbc_lightning.studies.tuning import check_tried, tune

# Seconds between two looks at the folders of the runs; a look takes 50 µs for each run that has not ended.
SECONDS_BETWEEN_LOOKS = 0.5


class Pool(Protocol):
    """What does the runs of a study: processes, jobs of a cluster, or this process."""

    def advance(self, states: Sequence[State]) -> str | None:
        """Let some of these open runs be done; return why none of them will be any more, or None."""


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
        self._is_looked_at, self._tuning_looked_at = False, set[tuple[str, str]]()

    def do(self, pool: Pool) -> None:
        """Let a pool do all runs that are not finished, and wait for those that other processes do.

        Raises:
            ConfigurationError: A folder holds another run, nothing was tuned, or a metric is not logged.
        """

        def tried(runs: Sequence[Run]) -> list[State]:
            states = self._do("tuning", runs, pool)
            self.trials += states
            return states

        # Every worker and every job goes through this method, tuning included: searches are deterministic, so all ask
        # for the same runs in the same order, and find the same best values without a word to each other.
        chosen = tune(self.study, tried)
        self.states = self._do(str(self.study.name), self._reported(chosen), pool)

    def _reported(self, chosen: dict[tuple[str, str], dict[str, Any]]) -> list[Run]:
        """Return the runs that are reported, ordered by seed so that the tables of a partial study can compare."""
        study = self.study
        return [
            study.run(variant, method, seed, chosen.get((variant, method.name)))
            for seed in study.seed_list
            for variant in study.variants
            for method in study.methods
        ]

    def _do(self, title: str, runs: Sequence[Run], pool: Pool) -> list[State]:
        """Do runs under a progress bar, and return what has become of each."""
        states = [State(run, "finished" if is_finished(run) else "waiting") for run in runs]
        with StudyProgress(title, self.console) as progress:
            progress.show(states)
            while left := [state for state in states if state.is_open]:
                reason = pool.advance(left)
                for state in left:
                    state.look(self._since)
                    if reason is not None and state.is_open:
                        state.look(0.0)  # it may have failed in a job that was submitted before this command began
                        state.status, state.error = "failed", state.error or reason
                progress.show(states)
                self._look_at_metrics(states)
                if any(state.is_open for state in left):
                    time.sleep(SECONDS_BETWEEN_LOOKS)
        return states

    def _look_at_metrics(self, states: Sequence[State]) -> None:
        """Check on the first finished runs that they log the study's metrics, before all others have been run.

        The tuning metric is checked on the first finished trial of each algorithm in each variant, the reported metrics
        as soon as one run of every algorithm has finished.

        Raises:
            ConfigurationError: A metric is not logged.
        """
        done = finished(states)
        for run in done:
            if run.tried and (run.variant, run.method) not in self._tuning_looked_at:
                self._tuning_looked_at.add((run.variant, run.method))
                check_tried(self.study, run)
        first = {run.method: run for run in reversed(done) if not run.tried}
        if not self._is_looked_at and len(first) == len(self.study.methods):
            self._is_looked_at = True
            check_metrics(self.study, first.values())
