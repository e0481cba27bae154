"""What the runs of a study gave, read from its folder: a row per run, means, paired differences, and curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import read, write
from fedbc_lightning.core.metric_names import SIMULATED_SECONDS, measured
from fedbc_lightning.run.run_record import RunRecord
from fedbc_lightning.studies.conclusions import Readings, reports
from fedbc_lightning.studies.methods import Tuning
from fedbc_lightning.studies.paper import Claim, Paper
from fedbc_lightning.studies.statistics import KEYS, Report, criterion, paired_differences, reported_rows, summarise
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run, State

# Columns of ``metrics.csv`` that are summed over the rounds.
COSTS = ("comm/bytes_up", "comm/bytes_down", "time/round_seconds")
# What results may cost: columns of :attr:`StudyRecord.curves` with their names on axes and in captions.
AXES = {"rounds": "rounds", "bytes": "MB sent and received", "seconds": "seconds of training",
        "simulated_seconds": "simulated seconds"}  # fmt: skip


def finished(states: Iterable[State], method: str | None = None, *levels: str) -> list[Run]:
    """Return the runs that have finished without error, in the given order.

    Args:
        states: States of the runs of a study.
        method: Name of the algorithm; None: all.
        levels: Variants, or levels in their names such as "E = 5"; the runs returned have all of them.
    """
    runs = [state.run for state in states if state.status == "finished" and method in (None, state.run.method)]
    return [run for run in runs if {run.variant, *run.variant.split(", ")}.issuperset(levels)]


def read_results(
    study: Study, states: Iterable[State], report: Report | None = None, metric: str | None = None
) -> pd.DataFrame:
    """Return the tidy table of all runs, one row per run.

    Of a run that has not finished, the columns from ``round`` to ``seconds`` are empty.

    Args:
        study: The study.
        states: States of its runs.
        report: Which round is read; None: the one that the study reports.
        metric: Metric that chooses the best round; None: the first of the study's metrics.
    """
    rows = []
    for state in states:
        run = state.run
        row = {"variant": run.variant, "algorithm": run.method, "seed": run.seed}
        row |= {"status": state.status, "report": report or study.report, "error": state.error}
        if state.status == "finished":
            reported = rows_of_run(study, run, report, metric)
            row |= {"round": int(reported["round"].iloc[-1]), "rounds": run.record.num_rounds}
            row |= {**reported.reindex(columns=study.metrics).mean(skipna=False), **totals(run.record.metrics)}
        rows.append(row | {"folder": str(run.record.folder if state.status == "finished" else run.folder)})
    costs = ["rounds", "bytes_up", "bytes_down", "seconds"]
    columns = [*KEYS, "status", "report", "round", *study.metrics, *costs, "error", "folder"]
    return pd.DataFrame(rows, columns=columns)


def rows_of_run(study: Study, run: Run, report: Report | None = None, metric: str | None = None) -> pd.DataFrame:
    """Return the rows of ``metrics.csv`` that are reported of a finished run.

    Args:
        study: The study, which says whether low values of a metric are good.
        run: The run.
        report: Which round is read; None: the one that the study reports.
        metric: Metric that chooses the best round; None: the first of the study's metrics.

    Raises:
        ConfigurationError: The run does not log the metric by which the round is chosen.
    """
    report = report or study.report
    chosen_by = criterion(report, metric or study.metrics[0])
    if report.startswith("best_on_") and chosen_by not in run.record.metrics:
        raise ConfigurationError(f"report: {report} needs '{chosen_by}', which {run.title} does not log.")
    is_lower_better = study.is_lower_better(chosen_by)
    return reported_rows(run.record.metrics, report, chosen_by, is_lower_better=is_lower_better)


def totals(metrics: pd.DataFrame) -> dict[str, float]:
    """Sum the bytes and seconds of a whole run."""
    summed = metrics.sum(numeric_only=True)
    seconds = summed.get("time/round_seconds", 0.0) + summed.get("time/eval_seconds", 0.0)
    found = {name: int(summed.get(f"comm/{name}", 0)) for name in ("bytes_up", "bytes_down")}
    return {**found, "seconds": round(float(seconds), 3)}


def check_pairs(runs: Iterable[Run]) -> list[str]:
    """Return what prevents a comparison of finished runs.

    Paired differences cancel the effects of data, initial model and sampled clients on the numbers; so within a variant
    and seed the runs must share all of them, and the user's code, which may have changed since the first runs finished.
    """
    pairs: dict[tuple[str, int], dict[str, RunRecord]] = {}
    for run in runs:
        pairs.setdefault((run.variant, run.seed), {})[run.method] = run.record
    shared: dict[str, Callable[[RunRecord], Any]] = {
        "partition of the data": lambda record: record.partition.get("hash", "")[:12],
        "samples of the clients": lambda record: tuple(sorted(record.identity.get("samples", {}).items())),
        "code of the user's classes": _code,
        "initial model": _initial_values,
        "sampled clients": sampled_clients,
    }
    problems = []
    for (variant, seed), records in pairs.items():
        for what, part in shared.items():
            known = {name: value for name, record in records.items() if (value := part(record))}
            # A method may send another way or stop early, so what is compared is what both have.
            length = min(map(len, known.values()), default=0)  # compare common rounds only: a run may have ended early
            if len({value[:length] for value in known.values()}) > 1:
                problems.append(f"{variant}, seed {seed}: the algorithms do not share the {what}: {', '.join(known)}")
    return problems


def _code(record: RunRecord) -> tuple[tuple[str, str], ...]:
    """Return the hashes of the user's classes; that of the method is its own."""
    own = f"the class {record.identity.get('settings', {}).get('algorithm')}"
    found = record.identity.get("code", {}).items()
    return tuple(sorted(item for item in found if item[0].startswith("the class ") and item[0] != own))


def _initial_values(record: RunRecord) -> tuple[float, ...]:
    """Return the metrics of z before the first round; empty if it was not evaluated."""
    first = record.metrics.head(1)
    values = first[[name for name in first if (found := measured(name)) and found.place == "global"]].dropna(axis=1)
    return tuple(values.iloc[0]) if first["round"].iloc[0] == 0 else ()


def sampled_clients(record: RunRecord) -> tuple[tuple[int, ...], ...]:
    """Return the sampled clients of each round; empty where they may differ between methods.

    They do if the run trains on pooled data, if late results are used, or if clients come and go by a simulated clock,
    so that methods whose rounds differ in length meet other clients.
    """
    rows, system = record.clients, (record.config.get("trainer") or {}).get("system") or {}
    if rows.empty or rows["client"].min() < 0 or "staleness" in rows or system.get("availability"):
        return ()
    return tuple(tuple(sorted(clients)) for _, clients in rows.groupby("round")["client"])


# the folder of a study

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
    def results(self) -> pd.DataFrame:
        """Table with one row per run; see :func:`read_results`."""
        return read_results(self.study, self.states)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Means and deviations over seeds, of the round that the study reports."""
        return summarise(self.results, self.study.metrics)

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Paired differences to the reference, of the same round."""
        study = self.study
        found = paired_differences(self.results, study.metrics, study.reference_name, study.confidence)
        return found.assign(report=study.report)

    @cached_property
    def readings(self) -> dict[str, Readings]:
        """The runs at the rounds that a paper's numbers might be of, for each of the study's papers by name."""
        return {
            name: {report: read_results(self.study, self.states, report, paper.metric)
                   for report in reports(paper, self.study)}
            for name, paper in self.study.papers.items()
        }  # fmt: skip

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why some of the runs cannot be compared; empty if none was found."""
        return check_pairs(finished(self.states))

    @cached_property
    def curves(self) -> pd.DataFrame:
        """What the finished runs measured in each round, with the accumulated cost up to it.

        The columns are variant, algorithm, seed, rounds, bytes (in MB), seconds, simulated_seconds if runs have a
        simulated clock, and the study's metrics.
        """
        parts = []
        for run in finished(self.states):
            metrics = run.record.metrics
            # The initial model costs nothing, and what a run does not measure is 0.
            costs = metrics.reindex(columns=[*COSTS, SIMULATED_SECONDS]).fillna(0)
            up, down, seconds = (costs[name].cumsum() for name in COSTS)
            found = {"variant": run.variant, "algorithm": run.method, "seed": run.seed, "rounds": metrics["round"],
                     "bytes": (up + down) / 1e6, "seconds": seconds}  # fmt: skip
            if SIMULATED_SECONDS in metrics:
                found["simulated_seconds"] = costs[SIMULATED_SECONDS]
            parts.append(pd.DataFrame(found, metrics.index).join(metrics.reindex(columns=self.study.metrics)))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    @cached_property
    def runs(self) -> dict[tuple[str, str, int], RunRecord]:
        """Records of the finished runs, by variant, algorithm and seed."""
        return {(run.variant, run.method, run.seed): run.record for run in finished(self.states)}

    def runs_of(self, variant: str, algorithm: str) -> list[RunRecord]:
        """Return the finished runs of one algorithm in one variant, in the order of the seeds."""
        return [record for place, record in self.runs.items() if place[:2] == (variant, algorithm)]


def write_record(study: Study, command: str | None) -> None:
    """Write ``study.json`` beside the study's tables.

    Args:
        study: The study, which may have been reduced to the part that a table of a paper needs.
        command: Command line that runs the study; None if it was made in Python.
    """
    content = {"command": command, "part": study.part, "config": study.as_config()}
    write(study.results_folder / RECORD, json.dumps(content, indent=1, default=str) + "\n")


def read_record(folder: Path) -> StudyRecord:
    """Read the folder that holds a study's tables and ``study.json``; it may have been moved or renamed.

    Raises:
        ConfigurationError: A file was changed so that it cannot be read, or is of an older version.
    """
    path = folder / RECORD
    try:
        content = json.loads(read(path))
        given, part, command = (content[key] for key in ("config", "part", "command"))
        papers = {name: Paper(**paper | {"claims": [Claim(**claim) for claim in paper["claims"]]})
                  for name, paper in given["papers"].items()}  # fmt: skip
        study = Study(**given | {"papers": papers, "tuning": Tuning(**given["tuning"])})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"'{path}' is not what a study writes ({type(error).__name__}: {error}); give the command that runs the "
            "study again: it writes the file anew, and repeats no finished run."
        ) from None
    # The folder may have been moved or renamed since, so its own name counts, not the recorded one.
    home = folder.resolve().parent if part else folder.resolve()
    study.out, study.name, study.part = str(home.parent), home.name, part
    states = [State(run) for run in study.runs()]
    for state in states:
        state.look(since=-math.inf)  # a failure counts, whenever that was
    return StudyRecord(study, command, states)
