"""A study as its folder records it: what was asked for in ``study.json``, and how far each run has come."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import write_text
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.methods import Tuning
from fedbc_lightning.studies.paper import Claim, Paper
from fedbc_lightning.studies.results import Outcome, finished, read_curves, read_outcome
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import State

# File beside a study's tables that holds its settings.
RECORD = "study.json"


@dataclass(frozen=True)
class StudyRecord:
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
        return read_curves(self.study, finished(self.states))

    @cached_property
    def runs(self) -> dict[tuple[str, str, int], RunRecord]:
        """Records of the finished runs, by variant, algorithm and seed."""
        return {(run.variant, run.method, run.seed): run.record for run in finished(self.states)}

    def runs_of(self, variant: str, algorithm: str) -> list[RunRecord]:
        """Return the finished runs of one algorithm in one variant, in the order of the seeds."""
        keys = [(variant, algorithm, seed) for seed in self.study.seed_list]
        return [self.runs[key] for key in keys if key in self.runs]


def write_record(study: Study, command: str | None) -> None:
    """Write ``study.json`` beside the study's tables.

    Args:
        study: The study, which may have been reduced to the part that a table of a paper needs.
        command: Command line that runs the study; None if it was made in Python.
    """
    content = {
        "command": command,
        "part": study.part,
        "algorithms": [method.name for method in study.methods],
        "variants": list(study.variants),
        "papers": list(study.papers),
        "study": study.given,
    }
    write_text(study.results_folder / RECORD, json.dumps(content, indent=1, default=str) + "\n")


def read_record(folder: Path) -> StudyRecord:
    """Read the folder that holds a study's tables and ``study.json``; it may have been moved or renamed.

    Raises:
        ConfigurationError: A file was changed so that it cannot be read.
    """
    path = folder / RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        study = _study(content["study"])
        study.narrow([*content["algorithms"], *content["variants"]])
        study.papers = {name: study.papers[name] for name in content["papers"]}
        study.part, command = content["part"], content["command"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"'{path}' is not what a study writes ({type(error).__name__}: {error}); give the command that runs the "
            "study again: it writes the file anew, and repeats no finished run."
        ) from None
    # The folder may have been moved or renamed since, so its own name counts, not the recorded one.
    home = folder.resolve().parent if study.part else folder.resolve()
    study.out, study.name = str(home.parent), home.name
    states = [
        State(study.run(variant, method, seed))
        for seed in study.seed_list
        for variant in study.variants
        for method in study.methods
    ]
    for state in states:
        state.look(since=-math.inf)  # a failure counts, whenever that was
    return StudyRecord(study, command, states)


def _study(given: dict[str, Any]) -> Study:
    """Return the study that was made from these arguments."""
    papers = {}
    for name, paper in given["papers"].items():
        claims = [Claim(**claim) for claim in paper["claims"]]
        papers[name] = Paper(**paper | {"claims": claims})
    return Study(**given | {"papers": papers, "tuning": Tuning(**given["tuning"])})
