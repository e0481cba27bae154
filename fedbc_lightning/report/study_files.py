"""Reads the folder of a study: its runs, and how far each of them has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.report.files import RunFiles
from fedbc_lightning.studies.figures import read_curves
from fedbc_lightning.studies.notes import NOTE, has_ended, tables_folder
from fedbc_lightning.studies.outcome import Outcome, read_outcome
from fedbc_lightning.studies.record import read_record
from fedbc_lightning.studies.schedule import State
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run


@dataclass(frozen=True)
class StudyFiles:
    """What a study has left in its folder.

    Attributes:
        study: The study.
        command: Command line that runs it; None if it was run from Python.
        states: State of each run.
    """

    study: Study
    command: str | None
    states: Sequence[State]

    @cached_property
    def outcome(self) -> Outcome:
        """What the finished runs gave."""
        return read_outcome(self.study, self.states)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """What the finished runs measured in each round, and what it had cost; see :func:`read_curves`."""
        return read_curves(self.study, self.states)

    @cached_property
    def runs(self) -> dict[tuple[str, str, int], RunFiles]:
        """Files of the finished runs, by variant, algorithm and seed."""
        found = {}
        for state in self.states:
            folder = tables_folder(state.run.folder) if state.status == "finished" else None
            if folder is not None:
                found[state.run.variant, state.run.method, state.run.seed] = RunFiles(folder)
        return found

    def runs_of(self, variant: str, algorithm: str) -> list[RunFiles]:
        """Return the finished runs of one algorithm in one variant, in the order of the seeds."""
        keys = [(variant, algorithm, seed) for seed in self.study.seed_list]
        return [self.runs[key] for key in keys if key in self.runs]


def read_study_files(folder: Path) -> StudyFiles:
    """Read the folder with a study's ``study.json``.

    Raises:
        ConfigurationError: A file was changed so that it cannot be read.
    """
    study, command = read_record(folder)
    failures = _failures(study)
    states = []
    for seed in study.seed_list:
        for variant in study.variants:
            for method in study.methods:
                run = study.run(variant, method, seed)
                states.append(_state(run, failures.get((variant, method.name, str(seed)))))
    return StudyFiles(study, command, states)


def _state(run: Run, failure: str | None) -> State:
    """Return how far a run has come: ``finished``, ``failed``, ``unfinished`` or ``not begun``."""
    try:
        if (run.folder / NOTE).is_file() and has_ended(run.folder):
            return State(run, "finished")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"'{run.folder / NOTE}' cannot be read: {error}; remove that folder.") from None
    folder = tables_folder(run.folder)
    if failure is not None:
        return State(run, "failed", error=failure)
    if folder is None:
        return State(run, "not begun")
    files = RunFiles(folder)
    return State(run, "unfinished", files.last_round, files.max_rounds)


def _failures(study: Study) -> dict[tuple[str, str, str], str]:
    """Return why runs have failed when the study was run last, by variant, algorithm and seed."""
    path = study.results_folder / "results.csv"
    if not path.is_file():
        return {}
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        rows = rows[rows["status"] == "failed"]
        return {(row.variant, row.algorithm, row.seed): row.error for row in rows.itertuples()}
    except (AttributeError, KeyError, ValueError) as error:
        raise ConfigurationError(f"'{path}' cannot be read: {error}.") from None
