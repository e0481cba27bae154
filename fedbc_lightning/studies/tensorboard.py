"""Writes a study for TensorBoard: one run per algorithm and variant, with means over seeds and bands of deviation."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedbc_lightning.core.metric_names import Measured, measured
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run, slug

# Folder in that of the study; the runs of single seeds and of tuning lie beside it, so that they hide no mean.
FOLDER = "tensorboard"
# Group of the borders of bands: TensorBoard sorts groups by name, and shows this one behind the means.
BANDS = "with_deviation"
BORDERS = {"mean - std": -1, "mean + std": 1}


def write_means(study: Study, runs: Iterable[Run], results: pd.DataFrame) -> Path:
    """Write the means over seeds of all metrics, their bands for the tab CUSTOM SCALARS, and settings for HPARAMS.

    Args:
        study: The study.
        runs: Its finished runs.
        results: A row per run, with the reported values of the study's metrics.

    Returns:
        The folder to be given to TensorBoard.
    """
    from torch.utils.tensorboard import SummaryWriter

    place = study.results_folder / FOLDER
    shutil.rmtree(place, ignore_errors=True)  # another round may be reported now, or a variant be gone
    by_curve: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_curve.setdefault((run.variant, run.method), []).append(run)
    for (variant, method), found in by_curve.items():
        folder = place / slug(method) if set(study.variants) == {"all"} else place / slug(variant) / slug(method)
        with SummaryWriter(str(folder)) as writer:
            _write_curves(writer, pd.concat([run.record.metrics for run in found]))
            rows = results[(results["variant"] == variant) & (results["algorithm"] == method)]
            _write_settings(writer, found[0], {name: float(rows[name].mean()) for name in study.metrics})
    return place


def _write_curves(writer: Any, table: pd.DataFrame) -> None:
    """Write the means at equal rounds, the borders of their bands, and a chart of each band."""
    grouped = table.groupby("round")
    means, deviations = grouped.mean(numeric_only=True), grouped.std(ddof=1, numeric_only=True).fillna(0.0)
    charts: dict[str, dict[str, Any]] = {}
    for name in means:
        what = measured(name)
        for round, value in means[name].dropna().items():
            writer.add_scalar(name, value, round)
            for border, sign in BORDERS.items() if what else ():
                writer.add_scalar(f"{BANDS}/{name} {border}", value + sign * deviations.loc[round, name], round)
        if what:
            band = [name, *(f"{BANDS}/{name} {border}" for border in BORDERS)]
            charts.setdefault(_category(what), {})[name] = ["Margin", band]
    # TensorBoard shows the last chart of a category first.
    writer.add_custom_scalars({name: dict(reversed(charts[name].items())) for name in sorted(charts)})


def _category(what: Measured) -> str:
    return f"{what.metric}: mean over seeds ± standard deviation"


def _write_settings(writer: Any, run: Run, reported: Mapping[str, float]) -> None:
    """Write the settings that the seeds share, and their mean reported values."""
    from torch.utils.tensorboard.summary import hparams

    given: dict[str, Any] = {"variant": run.variant, "method": run.method}
    for key, value in run.settings.items():
        given[key] = value if isinstance(value, (bool, int, float)) else str(value)
    for name, value in reported.items():
        writer.add_scalar(f"reported/{name}", value, 0)
    # Without the first summary, of a whole experiment: TensorBoard reads only one of these for all runs that it shows.
    for summary in hparams(given, {})[1:]:
        writer.file_writer.add_summary(summary)
