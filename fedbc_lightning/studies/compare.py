"""``fedbc-cli compare``: a study from its config to its tables."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import filelock
import pandas as pd
import torch
from jsonargparse import Namespace
from rich.console import Console

from fedbc_lightning.cli.arguments import PROG
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import write_text
from fedbc_lightning.studies.figures import draw_curves, read_curves
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.numbers import Rows
from fedbc_lightning.studies.progress import StudyProgress
from fedbc_lightning.studies.results import can_choose, check_metrics, check_pairs, finished, read_results
from fedbc_lightning.studies.run import Run
from fedbc_lightning.studies.schedule import Schedule, State, Workers
from fedbc_lightning.studies.statistics import paired_differences, summarise
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.tables import latex, markdown, show, tables
from fedbc_lightning.studies.tuning import check_tried, tune, validation_metric


class Comparison:
    """A study that is done, or gone on with, in its folder.

    Args:
        study: What is compared.
        console: Where progress and tables are shown.

    Attributes:
        results: One row per run, see :func:`~fedbc_lightning.studies.results.read_results`.
        differences: See :func:`~fedbc_lightning.studies.statistics.paired_differences`.
        problems: Why some of it is not to be trusted; empty: nothing is wrong.
    """

    def __init__(self, study: Study, console: Console | None = None) -> None:
        self.study, self.console = study, console or Console()
        self.results = self.summary = self.differences = pd.DataFrame()
        self.states: list[State] = []
        self.trials: list[State] = []
        self.problems: list[str] = []

    def run(self) -> bool:
        """Everything: checks, tuning, runs, tables, figures; whether no run failed.

        Raises:
            ConfigurationError: The study cannot be done as it is given; nothing has been started by then.
        """
        study = self.study
        self.check()
        try:
            study.results_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"out: '{study.results_folder}' cannot be made: {error.strerror}.") from None
        lock = filelock.FileLock(study.folder / ".lock")
        try:
            held = lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ConfigurationError(f"'{study.folder}' is being worked on by another process.") from None
        devices = list(range(torch.cuda.device_count()))
        with held:
            with Workers(study.num_workers, study.threads, devices) as self._workers:
                self._is_looked_at, self._tuning_looked_at = False, set[tuple[str, str]]()
                chosen = tune(study, self._tune)
                self.states = self._do(str(study.name), self._runs(chosen))
            self._write()
        self._show()
        return all(state.status == "finished" for state in self.states) and not self.problems

    def _tune(self, runs: Sequence[Run]) -> list[State]:
        states = self._do("tuning", runs)
        self.trials += states
        return states

    def _runs(self, chosen: dict[tuple[str, str], dict[str, Any]]) -> list[Run]:
        """The runs that are reported: seed by seed, so that early tables compare something."""
        study = self.study
        return [
            study.run(variant, method, seed, chosen.get((variant, method.name)))
            for seed in study.seed_list
            for variant in study.variants
            for method in study.methods
        ]

    def _do(self, title: str, runs: Sequence[Run]) -> list[State]:
        with StudyProgress(title, self.console) as progress:

            def on_change(schedule: Schedule) -> None:
                progress.show(schedule)
                self._look_at_metrics(schedule.states)

            return Schedule(runs, self._workers, on_change, self.study.together).run()

    def _look_at_metrics(self, states: Sequence[State]) -> None:
        """Of the first finished runs: that they log what is looked at, before all the others are done.

        What tunes is looked at in the first run of each algorithm in each variant, what is reported once all have one.

        Raises:
            ConfigurationError: None does.
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

    # before anything starts

    def check(self) -> None:
        """Parse command lines in this process, and look at what a study cannot do.

        Those of each algorithm with each value of its grids in the first variant, of the first algorithm in each
        variant, and of all algorithms in a variant that sets something of the algorithm.

        Raises:
            ConfigurationError: Something is wrong, with the run that shows it.
        """
        study = self.study
        if any(method.tuned for method in study.methods):
            validation_metric(study)
        if study.report.startswith("best_on_") and not can_choose(study.report, study.metrics[0]):
            raise ConfigurationError(
                f"report: {study.report}: '{study.metrics[0]}', the first of metrics, is of no test data; put one "
                "first that is, e.g. global/test_accuracy."
            )
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
        """Parse the command line of one run with values of what is tuned."""
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
            "eval_every_n_rounds: 0: leaves nothing to compare; give 1 or more": trainer["eval_every_n_rounds"] == 0,
        }  # fmt: skip
        if study.together > 1 and trainer["engine"] != "vectorized":
            raise ConfigurationError(
                f"together: {run.title}: clients of several runs are trained as one by trainer.engine: vectorized; "
                f"give it, or leave out together: {study.together}."
            )
        for what, is_asked in refused.items():
            if is_asked:
                raise ConfigurationError(f"{run.title}: trainer.{what}.")

    # afterwards

    def _write(self) -> None:
        """``results.csv``, ``differences.csv``, ``table.md``, ``table.tex``, figures and TensorBoard's hparams."""
        study, folder = self.study, self.study.results_folder
        self.results = read_results(study, self.states)
        if finished(self.states):
            check_metrics(study, finished(self.states))
        self.results.to_csv(folder / "results.csv", index=False)
        self.problems = check_pairs(study, self.results)
        self.summary = summarise(self.results, study.metrics)
        self.differences = paired_differences(self.results, study.metrics, study.reference_name, study.confidence)
        self.differences["report"] = study.report
        self.differences.to_csv(folder / "differences.csv", index=False)
        parts = self._parts()
        write_text(folder / "table.md", markdown(str(study.name), parts, self._notes()))
        write_text(folder / "table.tex", latex(parts))
        curves = read_curves(study, self.states)
        if not curves.empty:
            draw_curves(study, curves, folder / "figures")
            self._write_hparams()

    def _parts(self) -> list[tuple[str, Rows]]:
        return list(tables(self.study, self.results, self.summary, self.differences))

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

    def _write_hparams(self) -> None:
        """What TensorBoard's tab HPARAMS shows: a line per run, settings beside reported values."""
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        for row, state in zip(self.results.to_dict("records"), self.states, strict=True):
            run = state.run
            folder = self.study.folder / "hparams" / run.folder.relative_to(self.study.folder / "runs")
            if row["status"] != "finished":
                continue
            shutil.rmtree(folder, ignore_errors=True)  # another round may be reported now
            values = {name: float(row[name]) for name in self.study.metrics}
            given: dict[str, Any] = {"variant": run.variant, "method": run.method, "seed": run.seed}
            for key, value in run.settings.items():
                given[key] = value if isinstance(value, (bool, int, float)) else str(value)
            with contextlib.closing(SummaryWriter(str(folder))) as writer:
                for summary in hparams(given, {f"reported/{name}": value for name, value in values.items()}):
                    writer._get_file_writer().add_summary(summary)
                for name, value in values.items():
                    writer.add_scalar(f"reported/{name}", value)

    def _show(self) -> None:
        console, study = self.console, self.study
        for text, rows in self._parts():
            show(console, text, rows)
        for note in self._notes():
            console.print(note, style="red", markup=False, highlight=False, soft_wrap=True)
        console.print(f"Tables and curves:  {study.results_folder}/", highlight=False, soft_wrap=True)
        console.print(f"TensorBoard:        tensorboard --logdir {study.folder}", highlight=False, soft_wrap=True)


class _Parsed(FederatedCLI):
    """A command line of ``fit`` that is parsed, and neither built nor run."""

    def _set_seed(self) -> None: ...

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


def parse(run: Run) -> Namespace:
    """The whole config of a run.

    Raises:
        ConfigurationError: Its command line is wrong, with the parser's own words.
    """
    with parser_errors(run):
        return _Parsed(args=run.words(), parser_kwargs={"prog": PROG}).config


@contextlib.contextmanager
def parser_errors(run: Run) -> Iterator[None]:
    """Make an error of what a parser says of a run's command line; what else is printed to stderr is dropped.

    Raises:
        ConfigurationError: The parser ended the process.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        message = said.getvalue().strip().removeprefix(f"{PROG}: error: ")
        raise ConfigurationError(f"{run.variant} / {run.method}: {message}") from None
