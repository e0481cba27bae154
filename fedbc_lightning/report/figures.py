"""Draws the figures of a page, each small enough to be read on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbc_lightning.data import partition_picture
from fedbc_lightning.report.content import Picture
from fedbc_lightning.report.svg import as_svg, drawing
from fedbc_lightning.studies.figures import AXES, draw_band, label_x
from fedbc_lightning.studies.numbers import is_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 100
"""Largest number of points of a curve."""
FEW_POINTS = 40
"""Largest number of points of a curve in a small figure."""
MOST_NAMES = 30
"""Largest number of clients whose names stand beside a map of colours."""
MAX_ROWS = 500
"""Largest number of clients in a map of colours."""


def thinned(rounds: Sequence[int], most: int) -> list[int]:
    """Return rounds at equal distances, the last one included.

    Example:
        >>> thinned(range(7), most=3), thinned(range(3), most=3)
        ([0, 3, 6], [0, 1, 2])
    """
    step = max(1, -(-len(rounds) // most))
    return list(rounds)[::-1][::step][::-1]


def curves(
    name: str, frames: Mapping[str, pd.DataFrame], axis: str, metric: str, colors: Mapping[str, str]
) -> list[Picture]:
    """Draw the mean over seeds of a metric, and a band of one standard deviation, in one figure per variant.

    The vertical axis is that of the rounds after the first tenth, in which models differ little.

    Args:
        name: Prefix of the figures' ids.
        frames: Rows of :func:`~fedbc_lightning.studies.results.read_curves`, by title of the figure.
        axis: Column of the horizontal axis, one of ``AXES``.
        metric: Column of the vertical axis.
        colors: Map from algorithm to colour.
    """
    scale = 100.0 if is_share(metric) else 1.0
    every = pd.concat(frames.values())
    later = every[every["rounds"] > every["rounds"].max() / 10]
    limits = _limits(later[metric] * scale)
    pictures = []
    for place, (title, rows) in enumerate(frames.items()):
        kept = thinned(sorted(rows["rounds"].unique()), MAX_POINTS)
        rows = rows[rows["rounds"].isin(kept)].dropna(subset=[metric])
        rows = rows.assign(**{metric: rows[metric] * scale})
        with drawing():
            figure, panel = _panel()
            for algorithm, color in colors.items():
                draw_band(panel, rows[rows["algorithm"] == algorithm], axis, metric, algorithm, color)
            label_x(panel, AXES[axis])
            panel.set_ylabel(unit(metric))
            panel.set_ylim(*limits)
        alt = f"Curves of {metric} against {AXES[axis]} for {', '.join(colors)}{f' in {title}' if title else ''}."
        pictures.append(Picture(as_svg(figure, f"{name}{place}"), title, alt))
    return pictures


def lines(name: str, title: str, found: pd.DataFrame, label: str, colors: Mapping[str, str]) -> Picture:
    """Draw columns of a table of one run against its rounds.

    Args:
        name: Prefix of the figure's ids.
        title: Title of the figure.
        found: Table with the column ``round`` and one column per line.
        label: Label of the vertical axis.
        colors: Map from column to colour.
    """
    kept = found[found["round"].isin(thinned(sorted(found["round"].unique()), MAX_POINTS))]
    with drawing():
        figure, panel = _panel()
        for column, color in colors.items():
            shown = kept[["round", column]].dropna()
            panel.plot(shown["round"], shown[column], color=color, linewidth=1.4)
        label_x(panel, AXES["rounds"])
        panel.set_ylabel(label)
    return Picture(as_svg(figure, name), title, f"Curves against rounds: {', '.join(colors)}.")


def client_map(
    name: str,
    title: str,
    values: pd.DataFrame,
    label: str,
    limits: tuple[float | None, float | None] = (None, None),
) -> Picture:
    """Draw a value of each client over the rounds as a map of colours.

    Args:
        name: Prefix of the figure's ids.
        title: Title of the figure.
        values: Table with a row per client, the one with most data first, and a column per round; the names of its rows
            stand at the side where there are at most 30.
        label: What the colour means.
        limits: Values of the first and the last colour; None: the smallest and the largest of the values.
    """
    places = np.unique(np.linspace(0, len(values) - 1, MAX_ROWS).astype(int))
    with drawing():
        figure, panel = _panel()
        extent = (float(values.columns[0]) - 0.5, float(values.columns[-1]) + 0.5, len(values) - 0.5, -0.5)
        shown, (low, high) = values.to_numpy(dtype=float)[places], limits
        image = panel.imshow(
            shown, cmap="cividis", vmin=low, vmax=high, aspect="auto", interpolation="nearest", extent=extent
        )
        bar = figure.colorbar(image, ax=panel, pad=0.02, aspect=30)
        bar.set_label(label)
        bar.outline.set_visible(False)
        label_x(panel, AXES["rounds"])
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if len(values) <= MOST_NAMES:
            panel.set_yticks(range(len(values)), values.index.str.slice(0, 16), fontsize=min(7, 170 / len(values)))
            panel.set_ylabel("client")
        else:
            panel.yaxis.set_major_locator(MaxNLocator(6, integer=True))
            panel.set_ylabel("place of the client by its data")
        panel.grid(visible=False)
    alt = f"Map of colours: {label} of {len(values)} clients over {len(values.columns)} rounds."
    return Picture(as_svg(figure, name), title, alt, is_map=True)


def small_multiples(
    name: str, frames: Mapping[str, pd.DataFrame], metric: str, colors: Mapping[str, str]
) -> list[Picture]:
    """Draw one small figure per client, with a line per column, all on the same axes.

    Args:
        name: Prefix of the figures' ids.
        frames: Table of a client, with rounds as index and a column per line, by title of the figure.
        metric: Metric that is drawn.
        colors: Map from column to colour.
    """
    scale = 100.0 if is_share(metric) else 1.0
    every = pd.concat(frames.values()) * scale
    limits, span = _limits(every), (float(every.index.min()), float(every.index.max()))
    kept = thinned(sorted(every.index.unique()), FEW_POINTS)
    pictures = []
    for place, (title, values) in enumerate(frames.items()):
        with drawing():
            figure, panel = _panel(1.9, 1.3)
            for column, color in colors.items():
                if column in values:
                    shown = values.loc[values.index.isin(kept), column].dropna() * scale
                    panel.plot(shown.index, shown, color=color, linewidth=1.0)
            panel.set_xlim(*span)
            panel.set_ylim(*limits)
            panel.tick_params(labelsize=7, length=2)
            panel.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            panel.yaxis.set_major_locator(MaxNLocator(3))
        pictures.append(Picture(as_svg(figure, f"{name}{place}"), title, f"{metric} by round, {title}."))
    return pictures


def partition(name: str, title: str, content: Mapping[str, Any]) -> Picture:
    """Draw the classes and the number of samples of each client.

    Args:
        name: Prefix of the figure's ids.
        title: Title of the figure.
        content: Content of ``partition.json``, with the sizes of all clients.
    """
    sizes = {split: np.asarray(counts) for split, counts in content["sizes"].items()}
    histogram = content.get("label_histogram")
    with drawing():
        figure = partition_picture.draw(
            "", sizes, None if histogram is None else np.asarray(histogram), content.get("client_names")
        )
    alt = f"Number of samples of each class at each of {content['num_clients']} clients, and of all classes together."
    return Picture(as_svg(figure, name), title, alt)


def unit(metric: str) -> str:
    """Return the label of an axis: the metric with its unit."""
    return f"{metric}, %" if is_share(metric) else metric


def _panel(width: float = 4.2, height: float = 2.9) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    panel = figure.subplots()
    panel.grid(alpha=0.3)
    return figure, panel


def _limits(values: pd.DataFrame | pd.Series) -> tuple[float, float]:
    """Return common limits of the vertical axis, which leave out values that are far from all others."""
    found = values.to_numpy(dtype=float).ravel()
    found = found[np.isfinite(found)]
    if not len(found):
        return 0.0, 1.0
    low, high = found.min(), found.max()
    far = np.quantile(found, 0.98) * 3  # a loss that explodes in one run would flatten all others
    high = min(high, far) if low >= 0 and far > 0 else high
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin
