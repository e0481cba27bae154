"""``fedbc-cli compare`` takes a study from its config to its tables and figures."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pandas as pd

from fedbc_lightning.cli.printed_tables import show
from fedbc_lightning.core.files import make_folder, told, write
from fedbc_lightning.core.printing import Console, show_markdown
from fedbc_lightning.core.text import shorten
from fedbc_lightning.run.lock import locked
from fedbc_lightning.studies.conclusions import finding_sentences
from fedbc_lightning.studies.drawing import FOLDER, draw_curves, write_means
from fedbc_lightning.studies.numbers import csv_text
from fedbc_lightning.studies.origins import origin_rows
from fedbc_lightning.studies.parsed_runs import check_runs
from fedbc_lightning.studies.ray_tasks import RayTasks
from fedbc_lightning.studies.results import StudyRecord, write_record
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import State
from fedbc_lightning.studies.tables import latex, markdown, tables
from fedbc_lightning.studies.workers import Jobs, StudyRuns, Workers


class Comparison:
    """Runs a study in its folder, or resumes it there, and writes its tables and figures.

    Args:
        study: The study to run.
        console: Terminal on which progress and tables are shown; None: standard output.
        command: Command line that runs the study, for ``study.json``; None if it is run from Python.

    Attributes:
        states: States of the runs that are reported.
        results: Table with one row per run, from :func:`~fedbc_lightning.studies.results.read_results`.
        differences: Table made by :func:`~fedbc_lightning.studies.statistics.paired_differences`.
    """

    def __init__(self, study: Study, console: Console | None = None, command: str | None = None) -> None:
        self.study, self.console, self._command = study, console or Console(), command
        self.states: list[State] = []
        self.results = self.differences = pd.DataFrame()

    def run(self) -> bool:
        """Check, tune, run, write tables and figures; return whether every run finished and can be compared.

        Raises:
            ConfigurationError: The study cannot be run as configured.
        """
        study = self.study
        check_runs(study)
        with told(study.folder.parent, setting="out"):
            make_folder(study.folder.parent, is_private=True)
            make_folder(study.results_folder)
        with locked(study.folder):
            write_record(study, self._command)
        since = time.time()
        runs = StudyRuns(study, self.console, since)
        pool: Any = RayTasks(study, since) if study.backend == "ray" else Workers(study, since)
        with Jobs(study, self.console, since) if study.has_jobs else pool as pool:
            runs.do(pool.advance)
        self.states = runs.states
        record = StudyRecord(study, self._command, self.states)
        notes = [f"NOT COMPARABLE: {problem}" for problem in record.problems]
        notes += failure_notes([*runs.trials, *self.states])
        with locked(study.folder):
            self._write(record, notes)
        return not record.problems and len(record.runs) == len(self.states)

    def _write(self, record: StudyRecord, notes: list[str]) -> None:
        """Write tables, figures and TensorBoard's runs, and show the tables."""
        study, folder = self.study, self.study.results_folder
        self.results, self.differences = record.results, record.differences
        write(folder / "results.csv", csv_text(record.results))
        write(folder / "differences.csv", csv_text(record.differences))
        parts = list(tables(record))
        if study.origins:
            parts.append(("Settings, and where they come from", origin_rows(study, record.runs)))
        findings = finding_sentences(study, record.differences)
        text = markdown(str(study.name), parts, notes, findings)
        write(folder / "table.md", text)
        write(folder / "table.tex", latex(parts))
        if not record.curves.empty:
            draw_curves(study, record.curves, folder / "figures")
            write_means(record)
        if self.console.is_jupyter:
            body = text.partition("\n\n")[2]  # without its heading
            show_markdown(f"{body}\nTables and curves: `{folder}/`")
            return
        for caption, rows in parts:
            show(self.console, caption, rows)
        ends = [f"Tables and curves:  {folder}/", f"TensorBoard:        tensorboard --logdir {folder / FOLDER}"]
        for line in [*findings, *notes, *ends]:
            style = "red" if line in notes else None
            self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def failure_notes(states: Iterable[State]) -> list[str]:
    """Return a line for each reason why runs have failed."""
    failures: dict[str, list[str]] = {}
    for state in states:
        if state.status == "failed":
            failures.setdefault(str(state.error), []).append(state.run.title)
    return [f"failed: {shorten(titles, 1)}: {error}" for error, titles in failures.items()]
