"""``fedbc-cli compare`` takes a study from its config to its tables and figures."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from jsonargparse import Namespace
from rich.console import Console

from fedbc_lightning.cli.command_arguments import PROG
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import write_text
from fedbc_lightning.core.notebook import show_markdown
from fedbc_lightning.studies.figures import draw_curves
from fedbc_lightning.studies.findings import finding_sentences
from fedbc_lightning.studies.jobs import Jobs
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.origins import origin_rows, parsed_settings
from fedbc_lightning.studies.reported_round import can_choose
from fedbc_lightning.studies.results import Outcome, check_metrics, finished, read_curves, read_outcome
from fedbc_lightning.studies.runs import StudyRuns
from fedbc_lightning.studies.schedule import State, Workers
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_record import write_record
from fedbc_lightning.studies.study_run import Run
from fedbc_lightning.studies.tables import latex, markdown, show, tables
from fedbc_lightning.studies.targets import target_tables
from fedbc_lightning.studies.tensorboard import FOLDER, write_means
from fedbc_lightning.studies.tuning import validation_metric


class Comparison:
    """Runs a study in its folder, or resumes it there, and writes its tables and figures.

    Args:
        study: The study to run.
        console: Terminal on which progress and tables are shown; None: standard output.
        command: Command line that runs the study, for ``study.json``; None if it is run from Python.

    Attributes:
        results: Table with one row per run, from :func:`~fedbc_lightning.studies.results.read_results`.
        differences: Table made by :func:`~fedbc_lightning.studies.statistics.paired_differences`.
        problems: Reasons why some of the runs cannot be compared; an empty list means that none was found.
    """

    def __init__(self, study: Study, console: Console | None = None, command: str | None = None) -> None:
        self.study, self.console, self._command = study, console or Console(), command
        self.results = self.differences = pd.DataFrame()
        self._parts: list[tuple[str, Rows]] = []
        self._findings: list[str] = []
        self._origins: Rows = []
        self.states: list[State] = []
        self.trials: list[State] = []
        self.problems: list[str] = []

    def run(self) -> bool:
        """Check, tune, run, write tables and figures; return whether every run finished and can be compared.

        Raises:
            ConfigurationError: The study cannot be run as configured.
        """
        study = self.study
        self.check()
        try:
            study.results_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"out: '{study.results_folder}' cannot be made: {error.strerror}.") from None
        with study.locked():
            write_record(study, self._command)
        runs = StudyRuns(study, self.console)
        with self._pool() as pool:
            runs.do(pool)
        self.states, self.trials = runs.states, runs.trials
        with study.locked():
            self._write()
        self._show()
        return all(state.status == "finished" for state in self.states) and not self.problems

    def _pool(self) -> Workers | Jobs:
        """Return what does the runs: processes of this machine, or jobs of a cluster."""
        study = self.study
        if study.backend != "here":
            return Jobs(study, self.console)
        return Workers(study.num_workers, study.threads, range(torch.cuda.device_count()))

    # before anything starts

    def check(self) -> None:
        """Parse the command lines of representative runs in this process, and refuse settings that no study can have.

        These runs are: every algorithm with every value of its grids in the first variant, the first algorithm in every
        other variant, and all algorithms in a variant that overrides a setting of the algorithm.

        Raises:
            ConfigurationError: A command line is wrong or a setting is refused; the message names the run.
        """
        study = self.study
        if any(method.tuned for method in study.methods):
            validation_metric(study)
        if study.report.startswith("best_on_") and not can_choose(study.report, study.metrics[0]):
            raise ConfigurationError(
                f"report: {study.report}: '{study.metrics[0]}', the first of metrics, is not measured on test data; "
                "put one first that is, e.g. accuracy/global."
            )
        if study.origins:
            self._origins = origin_rows(study, parsed_settings(study, run_config))
        first = next(iter(study.variants))
        for method in study.methods:
            for tried in method.each_value():
                self._check_run(first, method, tried)
            if method.tuned:
                parse(study.trial(first, method, study.tuning.seeds[0], method.first()))
        for variant, overrides in list(study.variants.items())[1:]:
            is_of_algorithm = any(key.partition(".")[0] == "algorithm" for key in overrides or {})
            for method in study.methods if is_of_algorithm else study.methods[:1]:
                self._check_run(variant, method, method.first())

    def _check_run(self, variant: str, method: Method, tried: dict[str, Any]) -> None:
        """Parse the command line of one run whose tuned settings have the values ``tried``, and check its settings."""
        study = self.study
        run = study.run(variant, method, study.seed_list[0], tried)
        parsed = parse(run)["fit"]
        trainer, data = parsed["trainer"], parsed["data"] or {}
        if study.report == "best_on_validation" and not (data.get("init_args") or {}).get("val_fraction", 1):
            raise ConfigurationError(
                f"report: best_on_validation: {run.title} has no validation data; set data.val_fraction."
            )
        refused = {
            "engine: auto: might choose differently for runs that are compared; say sequential or vectorized":
                trainer["engine"] == "auto",
            "num_nodes: a study spreads its runs over the processes of one machine": trainer["num_nodes"] > 1,
            "devices: a study gives each run one device, and does several at a time; leave it out":
                trainer["devices"] not in ("auto", 1, "1", [0]),
            "system: null: there is no simulated clock for axis: simulated_seconds; give e.g. {compute: 1.0}":
                study.axis == "simulated_seconds" and not trainer["system"],
            "eval_every_n_rounds: 0: leaves nothing to compare; give 1 or more": trainer["eval_every_n_rounds"] == 0,
        }  # fmt: skip
        for what, is_asked in refused.items():
            if is_asked:
                raise ConfigurationError(f"{run.title}: trainer.{what}.")

    # afterwards

    def _write(self) -> None:
        """Write ``results.csv``, ``differences.csv``, ``table.md``, ``table.tex``, figures and TensorBoard's runs."""
        study, folder = self.study, self.study.results_folder
        if finished(self.states):
            check_metrics(study, finished(self.states))
        outcome = read_outcome(study, self.states)
        self.results, self.differences, self.problems = outcome.results, outcome.differences, outcome.problems
        self.results.to_csv(folder / "results.csv", index=False)
        self.differences.to_csv(folder / "differences.csv", index=False)
        curves = read_curves(study, finished(self.states))
        self._parts = self._make_parts(outcome, curves)
        self._findings = finding_sentences(study, outcome.differences)
        write_text(folder / "table.md", self._markdown())
        write_text(folder / "table.tex", latex(self._parts))
        if not curves.empty:
            draw_curves(study, curves, folder / "figures")
            write_means(study, finished(self.states), self.results)

    def _make_parts(self, outcome: Outcome, curves: pd.DataFrame) -> list[tuple[str, Rows]]:
        """Return caption and rows of each table, for the files and for the terminal."""
        parts = list(tables(self.study, outcome.summary, outcome.differences, outcome.readings))
        parts += target_tables(self.study, curves)
        if self.study.origins:
            parts.append(("Settings, and where they come from", self._origins))
        return parts

    def _markdown(self) -> str:
        return markdown(str(self.study.name), self._parts, self._notes(), self._findings)

    def _notes(self) -> list[str]:
        failures: dict[str, list[str]] = {}
        for state in [*self.trials, *self.states]:
            if state.status == "failed":
                failures.setdefault(str(state.error), []).append(state.run.title)
        failed = [
            f"failed: {titles[0]}{f' and {len(titles) - 1} more' if titles[1:] else ''}: {error}"
            for error, titles in failures.items()
        ]
        return [*(f"NOT COMPARABLE: {problem}" for problem in self.problems), *failed]

    def _show(self) -> None:
        console, study = self.console, self.study
        if console.is_jupyter:
            text = self._markdown().partition("\n\n")[2]  # without its heading
            show_markdown(f"{text}\nTables and curves: `{study.results_folder}/`")
            return
        for text, rows in self._parts:
            show(console, text, rows)
        for finding in self._findings:
            console.print(finding, markup=False, highlight=False, soft_wrap=True)
        for note in self._notes():
            console.print(note, style="red", markup=False, highlight=False, soft_wrap=True)
        console.print(f"Tables and curves:  {study.results_folder}/", highlight=False, soft_wrap=True)
        means = study.results_folder / FOLDER
        console.print(f"TensorBoard:        tensorboard --logdir {means}", highlight=False, soft_wrap=True)


class _Parsed(FederatedCLI):
    """Parses a command line of ``fit`` without building or running anything."""

    def set_seed(self) -> None:
        """Do nothing; see the base class."""

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None: ...

    def run_command(self, command: str) -> None:
        """Do nothing; see the base class."""


def parse(run: Run) -> Namespace:
    """Parse the command line of a run and return its complete config.

    Raises:
        ConfigurationError: The command line is wrong; the message is the parser's.
    """
    with parser_errors(run):
        return _Parsed(args=run.words(), parser_kwargs={"prog": PROG}).config


def run_config(run: Run) -> dict[str, Any]:
    """Return the complete config of a run as plain values, without the paths that it was read from.

    Raises:
        ConfigurationError: The command line is wrong; the message is the parser's.
    """
    return {key: value for key, value in parse(run)["fit"].as_dict().items() if key != "config"}


@contextlib.contextmanager
def parser_errors(run: Run) -> Iterator[None]:
    """Turn the parser's exit into an error that names the run; other output to stderr is dropped.

    Raises:
        ConfigurationError: The parser has refused the command line and asked to end the process.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        message = said.getvalue().strip().removeprefix(f"{PROG}: error: ")
        raise ConfigurationError(f"{run.variant} / {run.method}: {message}") from None
