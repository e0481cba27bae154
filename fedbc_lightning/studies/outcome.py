"""What the runs of a study gave: their table, means, paired differences, and readings for papers' tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from fedbc_lightning.studies.paper_rows import Readings, reports
from fedbc_lightning.studies.results import check_pairs, read_results
from fedbc_lightning.studies.schedule import State
from fedbc_lightning.studies.statistics import paired_differences, summarise
from fedbc_lightning.studies.study import Study


@dataclass(frozen=True)
class Outcome:
    """What the runs of a study gave.

    Attributes:
        results: Table with one row per run, from :func:`~fedbc_lightning.studies.results.read_results`.
        summary: Means and deviations over seeds, of the round that the study reports.
        differences: Paired differences to the reference, of the same round.
        readings: The runs at the rounds that a paper's numbers might be of, for each of the study's papers by name.
        problems: Reasons why some of the runs cannot be compared; an empty list means that none was found.
    """

    results: pd.DataFrame
    summary: pd.DataFrame
    differences: pd.DataFrame
    readings: dict[str, Readings]
    problems: list[str]


def read_outcome(study: Study, states: Sequence[State]) -> Outcome:
    """Read the tables of all finished runs, and compare them.

    Args:
        study: The study.
        states: States of its runs.
    """
    results = read_results(study, states)
    differences = paired_differences(results, study.metrics, study.reference_name, study.confidence)
    differences["report"] = study.report
    readings: dict[str, Readings] = {
        name: {report: read_results(study, states, report, paper.metric) for report in reports(paper, study)}
        for name, paper in study.papers.items()
    }
    problems = check_pairs(study, results)
    return Outcome(results, summarise(results, study.metrics), differences, readings, problems)
