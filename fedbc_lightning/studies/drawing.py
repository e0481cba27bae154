"""The curves of a study show means over seeds and their spread, as figures and as runs of TensorBoard."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbc_lightning.core.files import make_folder, refuse_link, remove, write
from fedbc_lightning.data.partition_picture import png
from fedbc_lightning.studies.results import AXES, StudyRecord
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import slug

# Ten colours that people with colour vision deficiencies can tell apart: M. Petroff 2021, arXiv:2107.02270.
COLORS = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")


@mpl.rc_context({"text.parse_math": False})  # names of algorithms and variants are text, also with $ in them
def draw_curves(study: Study, curves: pd.DataFrame, folder: Path) -> None:
    """Write ``<metric>_<axis>.png`` and ``.svg`` for every metric and axis.

    A line is the mean over seeds at equal rounds, drawn at their mean cost; the band is one standard deviation.
    """
    for metric, axis in itertools.product(study.metrics, [axis for axis in AXES if axis in curves]):
        figure, panels = panels_of(len(study.variants), 4.6, 3.5, columns=3, sharey=True)
        for panel, variant in zip(panels, study.variants, strict=True):
            for name, color in colors_of(study).items():
                mine = curves[(curves["variant"] == variant) & (curves["algorithm"] == name)]
                draw_band(panel, mine, axis, metric, name, color)
            finish(panel, AXES[axis], metric, str(study.name) if study.has_one_variant else variant)
        legend_below(figure, panels)
        save(figure, folder, f"{metric.replace('/', '_')}_{axis}")


def colors_of(study: Study) -> dict[str, str]:
    """Map each algorithm to its colour, which stays the same when only some of the algorithms are run."""
    palette = COLORS if len(study.algorithms) <= len(COLORS) else map(to_hex, mpl.color_sequences["tab20"])
    return dict(zip(study.algorithms, itertools.cycle(palette), strict=False))


def panels_of(
    count: int, width: float, height: float, *, columns: int = 5, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create a figure without a window and its panels, each ``width`` by ``height`` inches, in rows of ``columns``."""
    columns = max(1, min(count, columns))
    rows = max(1, math.ceil(count / columns))
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)
    for panel in panels[count:]:
        panel.remove()
    return figure, panels[:count]


def label_x(panel: Axes, label: str) -> None:
    """Label the horizontal axis; an axis of rounds gets ticks at whole numbers only."""
    panel.set_xlabel(label)
    if label == AXES["rounds"]:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def finish(panel: Axes, x: str, y: str, title: str) -> None:
    """Label a panel, and say so if nothing is drawn on it; where panels share y, only the first of a row names it."""
    label_x(panel, x)
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)
    place, sharing = panel.get_subplotspec(), panel.get_shared_y_axes().get_siblings(panel)
    if place is None or place.is_first_col() or len(sharing) == 1:
        panel.set_ylabel(y)
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
    refuse_link(folder)
    make_folder(folder)
    files = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
    write(files[0], png(figure))
    figure.set_layout_engine("none")  # both files have the layout of the first: finding it takes a while
    # Without a salt of our own and with the date, the same figure would differ in every run of a command.
    with mpl.rc_context({"svg.hashsalt": "fedbc"}):
        write(files[1], svg(figure, "Date"))
    return files


def svg(figure: Figure, *without: str) -> str:
    """Return a figure as SVG without these metadata, drawn only once as by :func:`png`."""
    file, figure.dpi = io.StringIO(), 150
    FigureCanvasSVG(figure).print_svg(file, metadata=dict.fromkeys(without))
    return file.getvalue()


def draw_band(panel: Axes, rows: pd.DataFrame, axis: str, metric: str, name: str, color: str) -> None:
    """Draw the mean over seeds of a metric as a line, and one standard deviation as a band.

    Args:
        panel: Where to draw.
        rows: Rows of :attr:`~fedbc_lightning.studies.results.StudyRecord.curves` of one algorithm in one variant.
        axis: Column of the horizontal axis.
        metric: Column of the vertical axis.
        name: Name of the line in the legend.
        color: Colour of line and band.
    """
    grouped = rows.dropna(subset=[metric]).groupby("rounds")
    if not len(grouped):
        return
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
    remove(place)  # a variant may be gone
    for variant, method in itertools.product(study.variants, study.methods):
        if runs := record.runs_of(variant, method.name):
            means = pd.concat([run.metrics for run in runs]).groupby("round").mean(numeric_only=True)
            folder = place if study.has_one_variant else place / slug(variant)
            with SummaryWriter(str(folder / slug(method.name))) as writer:
                for name, values in means.items():
                    for round, value in values.dropna().items():
                        writer.add_scalar(name, value, round)
