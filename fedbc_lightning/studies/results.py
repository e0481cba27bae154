"""Reads the results of a study from the tables of its runs: one row per run, of the reported round."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import TEST_ONLY, current_names, measured
from fedbc_lightning.studies.notes import tables_folder
from fedbc_lightning.studies.reported_round import Report, criterion
from fedbc_lightning.studies.schedule import State
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_checks import COLUMNS
from fedbc_lightning.studies.study_run import Run


def read_file(path: Path, **options: Any) -> pd.DataFrame:
    """Read a table of a run, with the names of metrics as they are now if an older version has written it.

    Args:
        path: The table.
        options: Options of ``pandas.read_csv``.
    """
    found = pd.read_csv(path, **options)
    return found if path.name == "clients.csv" else found.rename(columns=current_names(found.columns))


def read_metrics(run: Run) -> pd.DataFrame | None:
    """Read ``metrics.csv`` of a run, which has a row per round; None if the run has not begun."""
    folder = tables_folder(run.folder)
    return None if folder is None else read_file(folder / "metrics.csv")


def finished(states: Iterable[State]) -> list[Run]:
    """Return the runs that have finished without error, in the given order."""
    return [state.run for state in states if state.status == "finished"]


def finished_folder(run: Run) -> Path:
    """Return the folder with the tables of a finished run."""
    folder = tables_folder(run.folder)
    assert folder is not None
    return folder


def read_table(run: Run, name: str) -> pd.DataFrame:
    """Read the table ``metrics``, ``clients`` or ``evaluation`` of a finished run."""
    return read_file(finished_folder(run) / f"{name}.csv")


def read_results(
    study: Study, states: Iterable[State], report: Report | None = None, metric: str | None = None
) -> pd.DataFrame:
    """Return the tidy table of all runs, one row per run.

    The columns are :data:`~fedbc_lightning.studies.study_checks.COLUMNS`, with the study's metrics after ``round``.

    Args:
        study: The study.
        states: States of its runs.
        report: Which round is read; None: the one that the study reports.
        metric: Metric that chooses the best round; None: the first of the study's metrics.
    """
    report = report or study.report
    rows = []
    for state in states:
        run = state.run
        row = {"variant": run.variant, "algorithm": run.method, "seed": run.seed, "status": state.status}
        row["report"] = report
        metrics = read_metrics(run) if state.status == "finished" else None
        if metrics is not None:
            reported = reported_rows(study, run, metrics, report, metric)
            values = reported.reindex(columns=study.metrics).mean(skipna=False)
            row |= {"round": int(reported["round"].iloc[-1]), **values}
            row |= {"rounds": int(metrics["round"].max()), **totals(metrics)}
        rows.append(row | {"error": state.error, "folder": str(tables_folder(run.folder) or run.folder)})
    first, last = COLUMNS[: COLUMNS.index("rounds")], COLUMNS[COLUMNS.index("rounds") :]
    return pd.DataFrame(rows).reindex(columns=[*first, *study.metrics, *last])


def check_metrics(study: Study, runs: Iterable[Run]) -> None:
    """Raise if a metric of the study is logged by none of these finished runs.

    Raises:
        ConfigurationError: No run logs one of the metrics.
    """
    files = [finished_folder(run) / "metrics.csv" for run in runs]
    logged = dict.fromkeys(name for file in files for name in read_file(file, nrows=0))
    missing = [name for name in study.metrics if name not in logged]
    if missing:
        known = [name for name in logged if "/" in name and not name.startswith(("time/", "comm/"))]
        raise ConfigurationError(f"metrics: no run logs '{missing[0]}'; there is: {', '.join(known)}.")


def evaluated(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of rounds after which the models were evaluated, without the initial model's.

    A NaN in such a row means that the run has diverged.
    """
    columns = [name for name in metrics if (found := measured(name)) and found.place not in TEST_ONLY]
    return metrics[metrics[columns].notna().any(axis=1) & (metrics["round"] > 0)] if columns else metrics


def reported_rows(
    study: Study, run: Run, metrics: pd.DataFrame, report: Report | None = None, metric: str | None = None
) -> pd.DataFrame:
    """Return the row of the reported round, or the rows of the rounds whose mean is reported.

    Args:
        study: The study, which says whether low values of a metric are good.
        run: The run, for the error.
        metrics: Its ``metrics.csv``.
        report: Which round is read; None: the one that the study reports.
        metric: Metric that chooses the best round; None: the first of the study's metrics.

    Raises:
        ConfigurationError: The run does not log the metric by which the round is chosen.
    """
    report = report or study.report
    chosen_by = criterion(report, metric or study.metrics[0])
    if report.startswith("best_on_") and chosen_by not in metrics:
        raise ConfigurationError(f"report: {report} needs '{chosen_by}', which {run.title} does not log.")
    return rows_read(metrics, report, chosen_by, is_lower_better=study.is_lower_better(chosen_by))


def rows_read(metrics: pd.DataFrame, report: Report, chosen_by: str, *, is_lower_better: bool) -> pd.DataFrame:
    """Return the row of the reported round, or the rows of the rounds whose mean is reported.

    Args:
        metrics: Table ``metrics.csv`` of a run.
        report: Which round is read.
        chosen_by: Column that chooses the best round.
        is_lower_better: Whether small values of that column are good.
    """
    rows = evaluated(metrics)
    if report == "mean_of_last_tenth":
        return rows[10 * rows["round"] > 9 * rows["round"].iloc[-1]]
    values = rows[chosen_by].dropna() if report != "last" else pd.Series()
    if values.empty:
        return rows.tail(1)
    return rows.loc[[values.idxmin() if is_lower_better else values.idxmax()]]  # the first of equal values


def totals(metrics: pd.DataFrame) -> dict[str, float]:
    """Sum the bytes and seconds of a whole run."""
    summed = metrics.sum(numeric_only=True)
    seconds = summed.get("time/round_seconds", 0.0) + summed.get("time/eval_seconds", 0.0)
    found = {name: int(summed.get(f"comm/{name}", 0)) for name in ("bytes_up", "bytes_down")}
    return {**found, "seconds": round(float(seconds), 3)}


def check_pairs(study: Study, results: pd.DataFrame) -> list[str]:
    """Return what prevents a comparison of runs: within a variant and seed they must share data, model and clients."""
    problems = []
    finished = results[results["status"] == "finished"]
    shared = {"partition of the data": partition_hash, "initial model": initial_values, "sampled clients": sampled}
    for (variant, seed), runs in finished.groupby(["variant", "seed"], sort=False):
        for what, read in shared.items():
            found = {name: read(Path(folder)) for name, folder in zip(runs.algorithm, runs.folder, strict=True)}
            known = {name: value for name, value in found.items() if value}
            length = min(map(len, known.values()), default=0)  # compare common rounds only: a run may have ended early
            if len({value[:length] for value in known.values()}) > 1:
                problems.append(f"{variant}, seed {seed}: the algorithms do not share the {what}: {', '.join(known)}")
    return problems


def partition_hash(folder: Path) -> str:
    """Return the first 12 digits of the hash in a run's ``partition.json``."""
    return json.loads((folder / "partition.json").read_text(encoding="utf-8"))["hash"][:12]


def initial_values(folder: Path) -> tuple[float, ...]:
    """Return the metrics of z before the first round; empty if it was not evaluated."""
    first = read_file(folder / "metrics.csv", nrows=1)
    values = first[[name for name in first if (found := measured(name)) and found.place == "global"]].dropna(axis=1)
    return tuple(values.iloc[0]) if first["round"][0] == 0 else ()


def sampled(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Return the sampled clients of each round; empty if the run trains on pooled data, or if its time decides them."""
    rows = pd.read_csv(folder / "clients.csv")
    if rows.empty or rows["client"].min() < 0 or "staleness" in rows or _has_availability(folder):
        return ()
    return tuple(tuple(sorted(clients)) for _, clients in rows.groupby("round")["client"])


def _has_availability(folder: Path) -> bool:
    """Return whether clients of a run come and go, so that methods whose rounds differ in length meet other clients."""
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return bool(((config.get("trainer") or {}).get("system") or {}).get("availability"))
