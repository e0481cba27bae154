"""The curves of a study show means over seeds and their spread against rounds, bytes, seconds and simulated time."""

from __future__ import annotations

from collections.abc import Iterable
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

from fedbc_lightning.studies.study import Study

AXES = {"rounds": "round", "bytes": "sent and received, MB", "seconds": "seconds of training",
        "simulated_seconds": "simulated seconds"}  # fmt: skip
COLUMNS = 3


@mpl.rc_context({"text.parse_math": False})  # names of algorithms and variants are text, also with $ in them
def draw_curves(study: Study, curves: pd.DataFrame, folder: Path) -> list[Path]:
    """Write ``<metric>_<axis>.png`` and ``.svg`` for every metric and axis, and return the files.

    A line is the mean over seeds at equal rounds, drawn at their mean cost; the band is one standard deviation.
    """
    variants, colors = list(study.variants), colors_of(study)
    columns = min(len(variants), COLUMNS)
    rows = -(-len(variants) // columns)
    files = []
    for metric in study.metrics:
        for axis, label in AXES.items():
            if axis not in curves:
                continue
            figure, panels = panels_of(rows, columns, 4.6, 3.5, sharey=True)
            for panel, variant in zip(panels, variants, strict=False):
                for method in study.methods:
                    mine = curves[(curves["variant"] == variant) & (curves["algorithm"] == method.name)]
                    draw_band(panel, mine.dropna(subset=[metric]), axis, metric, method.name, colors[method.name])
                panel.set_title(variant if len(variants) > 1 or variant != "all" else str(study.name))
                label_x(panel, label)
                panel.grid(alpha=0.3)
            for panel in panels[len(variants) :]:
                panel.set_visible(False)
            for panel in panels[::columns]:
                panel.set_ylabel(metric)
            legend_below(figure, panels[:1])
            files += save(figure, folder, f"{metric.replace('/', '_')}_{axis}")
    return files


def colors_of(study: Study) -> dict[str, str]:
    """Map each algorithm to its colour, which stays the same when only some of the algorithms are run."""
    names = list(study.algorithms)
    if len(names) <= 10:
        return {name: f"C{place}" for place, name in enumerate(names)}
    many = mpl.colormaps["tab20"]
    return {name: to_hex(many(place % many.N)) for place, name in enumerate(names)}


def panels_of(
    rows: int, columns: int, width: float, height: float, *, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Create a figure without a window and its panels, each ``width`` by ``height`` inches."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)


def label_x(panel: Axes, label: str) -> None:
    """Label the horizontal axis; an axis of rounds gets ticks at whole numbers only."""
    panel.set_xlabel(label)
    if label == AXES["rounds"]:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def finish(panel: Axes, x: str, y: str, title: str) -> None:
    """Label a panel, whose vertical axis may have its label elsewhere, and say so if nothing is drawn on it."""
    label_x(panel, x)
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)
    if y:
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
