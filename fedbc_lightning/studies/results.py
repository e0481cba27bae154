"""One row per run: what its tables say of the reported round."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from fedbc_lightning.errors import ConfigurationError
from fedbc_lightning.studies.numbers import is_lower_better
from fedbc_lightning.studies.schedule import State, version_folder
from fedbc_lightning.studies.statistics import KEYS
from fedbc_lightning.studies.study import Report, Run, Study


def read_metrics(run: Run) -> pd.DataFrame | None:
    """``metrics.csv`` of a run, a row per round; None: it has not begun."""
    folder = version_folder(run)
    return None if folder is None else pd.read_csv(folder / "metrics.csv")


def finished(states: Iterable[State]) -> list[Run]:
    """The runs that have ended well, in their order."""
    return [state.run for state in states if state.status == "finished"]


def finished_folder(run: Run) -> Path:
    """Where the tables of a finished run lie."""
    folder = version_folder(run)
    assert folder is not None
    return folder


def read_table(run: Run, name: str) -> pd.DataFrame:
    """``metrics``, ``clients`` or ``evaluation`` of a finished run."""
    return pd.read_csv(finished_folder(run) / f"{name}.csv")


def read_results(study: Study, states: Iterable[State]) -> pd.DataFrame:
    """The tidy table: columns variant, algorithm, seed, status, round, the metrics, rounds, bytes, seconds, folder.

    Raises:
        ConfigurationError: A finished run does not log what the study reports.
    """
    rows = []
    for state in states:
        run = state.run
        row = {"variant": run.variant, "algorithm": run.method, "seed": run.seed, "status": state.status}
        metrics = read_metrics(run) if state.status == "finished" else None
        if metrics is not None:
            reported = metrics.loc[reported_row(study, run, metrics)]
            row |= {"round": int(reported["round"]), **{name: reported[name] for name in study.metrics}}
            row |= {"rounds": int(metrics["round"].max()), **totals(metrics)}
        rows.append(row | {"error": state.error, "folder": str(version_folder(run) or run.folder)})
    columns = [
        *KEYS,
        "status",
        "round",
        *study.metrics,
        "rounds",
        "bytes_up",
        "bytes_down",
        "seconds",
        "error",
        "folder",
    ]
    return pd.DataFrame(rows).reindex(columns=columns)


def reported_row(study: Study, run: Run, metrics: pd.DataFrame) -> int:
    """The index of the round that is reported.

    Raises:
        ConfigurationError: The study's metrics are not there, or no validation metric to choose the round by.
    """
    missing = [name for name in study.metrics if name not in metrics]
    if missing:
        known = [name for name in metrics if "/" in name and not name.startswith(("time/", "comm/"))]
        raise ConfigurationError(f"metrics: {run.title} logs no '{missing[0]}'; there is: {', '.join(known)}.")
    chosen_by = criterion(study.report, study.metrics[0])
    if chosen_by not in metrics:
        raise ConfigurationError(
            f"report: {study.report} needs '{chosen_by}', which {run.title} does not log; set data.val_fraction above "
            "0."
        )
    evaluated = metrics[metrics[chosen_by].notna() & (metrics["round"] > 0)]
    if study.report == "last":
        return int(evaluated.index[-1])
    values = evaluated[chosen_by]
    return int(values.idxmin() if is_lower_better(chosen_by) else values.idxmax())  # the first of equal ones


def criterion(report: Report, metric: str) -> str:
    """The metric by which the reported round is chosen.

    Example:
        >>> criterion("best_on_validation", "global/test_accuracy"), criterion("last", "local/test_loss")
        ('global/val_accuracy', 'local/test_loss')
    """
    return metric.replace("/test_", "/val_") if report == "best_on_validation" else metric


def totals(metrics: pd.DataFrame) -> dict[str, float]:
    """Bytes and seconds of a whole run."""
    summed = metrics.sum(numeric_only=True)
    seconds = summed.get("time/round_seconds", 0.0) + summed.get("time/eval_seconds", 0.0)
    found = {name: int(summed.get(f"comm/{name}", 0)) for name in ("bytes_up", "bytes_down")}
    return {**found, "seconds": round(float(seconds), 3)}


def check_pairs(study: Study, results: pd.DataFrame) -> list[str]:
    """What breaks the comparison of runs of one variant and seed: another partition, or another initial model."""
    problems = []
    finished = results[results["status"] == "finished"]
    for (variant, seed), runs in finished.groupby(["variant", "seed"], sort=False):
        hashes = {name: partition_hash(Path(folder)) for name, folder in zip(runs.algorithm, runs.folder, strict=True)}
        if len(set(hashes.values())) > 1:
            problems.append(f"{variant}, seed {seed}: the algorithms do not share the partition of the data: {hashes}")
        starts = {}
        for name, folder in zip(runs.algorithm, runs.folder, strict=True):
            first = pd.read_csv(Path(folder) / "metrics.csv", nrows=1)
            if study.metrics[0] in first and first["round"][0] == 0 and study.metrics[0].startswith("global/"):
                starts[name] = first[study.metrics[0]][0]
        if len(set(starts.values())) > 1:
            problems.append(f"{variant}, seed {seed}: the algorithms do not share the initial model: {starts}")
    return problems


def partition_hash(folder: Path) -> str:
    """Of a run's ``partition.json``."""
    return json.loads((folder / "partition.json").read_text())["hash"][:12]
