"""The curves of a study show means over seeds and their spread, as figures and as runs of TensorBoard."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbc_lightning.studies.results import StudyRecord
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import slug

AXES = {"rounds": "round", "bytes": "sent and received, MB", "seconds": "seconds of training",
        "simulated_seconds": "simulated seconds"}  # fmt: skip


@mpl.rc_context({"text.parse_math": False})  # names of algorithms and variants are text, also with $ in them
def draw_curves(study: Study, curves: pd.DataFrame, folder: Path) -> None:
    """Write ``<metric>_<axis>.png`` and ``.svg`` for every metric and axis.

    A line is the mean over seeds at equal rounds, drawn at their mean cost; the band is one standard deviation.
    """
    colors = colors_of(study)
    titles = [str(study.name)] if list(study.variants) == ["all"] else list(study.variants)
    for metric, axis in itertools.product(study.metrics, AXES):
        if axis not in curves:
            continue
        figure, panels = titled_panels(titles, AXES[axis], metric)
        for panel, variant in zip(panels, study.variants, strict=True):
            for method in study.methods:
                mine = curves[(curves["variant"] == variant) & (curves["algorithm"] == method.name)]
                draw_band(panel, mine.dropna(subset=[metric]), axis, metric, method.name, colors[method.name])
        legend_below(figure, panels[:1])
        save(figure, folder, f"{metric.replace('/', '_')}_{axis}")


def colors_of(study: Study) -> dict[str, str]:
    """Map each algorithm to its colour, which stays the same when only some of the algorithms are run."""
    many, is_many = mpl.colormaps["tab20"], len(study.algorithms) > 10
    return {name: to_hex(many(place % many.N)) if is_many else f"C{place}"
            for place, name in enumerate(study.algorithms)}  # fmt: skip


def panels_of(
    rows: int, columns: int, width: float, height: float, *, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create a figure without a window and its panels, each ``width`` by ``height`` inches."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)


def titled_panels(
    titles: Sequence[str], x: str, y: str, columns: int = 3, width: float = 4.6, height: float = 3.5
) -> tuple[Figure, list[Axes]]:
    """Create a panel for each title, in rows that share their vertical axis."""
    columns = max(1, min(len(titles), columns))
    figure, panels = panels_of(max(1, -(-len(titles) // columns)), columns, width, height, sharey=True)
    for place, (panel, title) in enumerate(zip(panels, titles, strict=False)):
        _label(panel, x, y if place % columns == 0 else "", title)
    for panel in panels[len(titles) :]:
        panel.remove()
    return figure, panels[: len(titles)]


def label_x(panel: Axes, label: str) -> None:
    """Label the horizontal axis; an axis of rounds gets ticks at whole numbers only."""
    panel.set_xlabel(label)
    if label == AXES["rounds"]:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def _label(panel: Axes, x: str, y: str, title: str, size: float | str = "large") -> None:
    label_x(panel, x)
    panel.set_title(title, fontsize=size)
    panel.grid(alpha=0.3)
    if y:
        panel.set_ylabel(y)


def finish(panel: Axes, x: str, y: str, title: str) -> None:
    """Label a panel, whose vertical axis may have its label elsewhere, and say so if nothing is drawn on it."""
    _label(panel, x, y, title, size=10)
    if not panel.has_data():
        panel.text(0.5, 0.5, "no finished run", transform=panel.transAxes, ha="center", color="gray")
        panel.set_xticks([])


def legend_below(figure: Figure, panels: Iterable[Axes], columns: int = 5) -> None:
    """Draw one legend for all these panels below the figure."""
    shown: dict[str, Artist] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    if shown:
        ncols = min(len(shown), columns)
        figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=ncols, frameon=False)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``<name>.png`` and ``.svg`` and return the files; equal figures give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
    # Without a salt of our own and with the date, the same figure would differ in every run of a command.
    with mpl.rc_context({"svg.hashsalt": "fedbc"}):
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def draw_band(panel: Axes, rows: pd.DataFrame, axis: str, metric: str, name: str, color: str) -> None:
    """Draw the mean over seeds of a metric as a line, and one standard deviation as a band.

    Args:
        panel: Where to draw.
        rows: Rows of :func:`~fedbc_lightning.studies.results.read_curves` of one algorithm in one variant, without
            missing values of the metric.
        axis: Column of the horizontal axis.
        metric: Column of the vertical axis.
        name: Name of the line in the legend.
        color: Colour of line and band.
    """
    if rows.empty:
        return
    grouped = rows.groupby("rounds")
    x = grouped[axis].mean() if axis != "rounds" else grouped["rounds"].first()
    mean, spread = grouped[metric].mean(), grouped[metric].std(ddof=1).fillna(0.0)
    panel.plot(x, mean, color=color, label=name, linewidth=1.4)
    if np.any(spread > 0):
        panel.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)


# TensorBoard

# Folder in that of the study; the runs of single seeds and of tuning lie beside it, so that they hide no mean.
FOLDER = "tensorboard"


def write_means(record: StudyRecord) -> None:
    """Write the means over seeds of all metrics: a run of TensorBoard for each algorithm in each variant."""
    from torch.utils.tensorboard import SummaryWriter

    study = record.study
    place = study.results_folder / FOLDER
    shutil.rmtree(place, ignore_errors=True)  # a variant may be gone
    for variant, method in itertools.product(study.variants, study.methods):
        if runs := record.runs_of(variant, method.name):
            means = pd.concat([run.metrics for run in runs]).groupby("round").mean(numeric_only=True)
            folder = place if set(study.variants) == {"all"} else place / slug(variant)
            with SummaryWriter(str(folder / slug(method.name))) as writer:
                for name, values in means.items():
                    for round, value in values.dropna().items():
                        writer.add_scalar(name, value, round)
