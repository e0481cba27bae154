"""Draws the figures of a page as SVG, each small enough to be read on a phone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbc_lightning.data import partition_picture
from fedbc_lightning.pages.page import Picture
from fedbc_lightning.studies.drawing import COLORS, draw_band, label_x, svg
from fedbc_lightning.studies.numbers import is_share
from fedbc_lightning.studies.results import AXES

STYLE: Any = {
    "axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "font.size": 9.0, "grid.alpha": 0.3,
    "axes.prop_cycle": cycler(color=COLORS),
    "svg.fonttype": "none",  # letters stay letters: smaller, sharp, and found by a search in the page
    "svg.hashsalt": "fedbc",  # equal figures give equal bytes
    "text.parse_math": False,  # names of algorithms and variants are text, also with $ in them
}  # fmt: skip
# Largest number of points of a curve; a page of a study has hundreds of them.
MAX_POINTS = 100
# Largest number of points of a curve in a small figure.
FEW_POINTS = 40
# Largest number of clients whose names stand beside a map of colours.
MOST_NAMES = 30
# Largest number of clients in a map of colours.
MAX_ROWS = 500
T = TypeVar("T")


def spread(items: Iterable[T], most: int) -> list[T]:
    """Return the items that are drawn: all, or ``most`` from the first to the last at even distances.

    Example:
        >>> spread(range(7), most=3), spread(range(3), most=3)
        ([0, 3, 6], [0, 1, 2])
    """
    every = list(items)
    places = np.linspace(0, len(every) - 1, min(most, len(every)))
    return [every[round(place)] for place in places]


def curves(
    frames: Mapping[str, pd.DataFrame], axis: str, metric: str, colors: Mapping[str, str], *, is_small: bool = False
) -> Iterator[Picture]:
    """Draw the mean over seeds of a metric, and a band of one standard deviation, in figures that share their limits.

    The vertical axis is that of the rounds after the first tenth, in which models differ little.

    Args:
        frames: Rows of :attr:`~fedbc_lightning.studies.results.StudyRecord.curves`, by title of the figure.
        axis: Column of the horizontal axis, one of ``AXES``.
        metric: Column of the vertical axis.
        colors: Map from algorithm to colour.
        is_small: Whether the figures are small, with few points and without labels of the axes.
    """
    scale = 100.0 if is_share(metric) else 1.0
    every = pd.concat(frames.values())
    # The first rounds reach from chance to half of the final accuracy, and would flatten all that is of interest.
    limits = _limits(every.loc[every["rounds"] > every["rounds"].max() / 10, metric] * scale)
    for title, rows in frames.items():
        # Each figure by itself, because variants may be evaluated in different rounds.
        shown = spread(sorted(rows["rounds"].unique()), FEW_POINTS if is_small else MAX_POINTS)
        kept = rows[rows["rounds"].isin(shown)]
        kept = kept.assign(**{metric: kept[metric] * scale})

        def draw(panel: Axes, kept: pd.DataFrame = kept) -> None:
            for algorithm, color in colors.items():
                draw_band(panel, kept[kept["algorithm"] == algorithm], axis, metric, algorithm, color)
            panel.set(ylim=limits)
            if is_small:
                panel.set_xlim(every["rounds"].min(), every["rounds"].max())
                panel.tick_params(labelsize=7, length=2)
                panel.xaxis.set_major_locator(MaxNLocator(3, integer=True))
                panel.yaxis.set_major_locator(MaxNLocator(3))
            else:
                label_x(panel, AXES[axis])
                panel.set_ylabel(unit(metric))

        alt = f"Curves of {metric} against {AXES[axis]} for {', '.join(colors)}{f' in {title}' if title else ''}."
        yield Picture(_svg(draw, (1.9, 1.3) if is_small else (4.2, 2.9)), title, alt)


def client_map(title: str, values: pd.DataFrame, label: str) -> Picture:
    """Draw a value of each client over the rounds as a map of colours.

    Args:
        title: Title of the figure.
        values: Table with a row per client, the one with most data first, and a column per round; the names of its rows
            stand at the side where there are at most 30.
        label: What the colour means.
    """

    def draw(panel: Axes) -> None:
        shown = values.iloc[spread(range(len(values)), MAX_ROWS)]
        extent = (float(values.columns[0]) - 0.5, float(values.columns[-1]) + 0.5, len(values) - 0.5, -0.5)
        image = panel.imshow(shown, cmap="cividis", aspect="auto", interpolation="nearest", extent=extent)
        bar = panel.figure.colorbar(image, ax=panel, pad=0.02, aspect=30, label=label)
        bar.outline.set_visible(False)
        label_x(panel, AXES["rounds"])
        panel.grid(visible=False)
        panel.set_ylabel("place of the client by its data")
        if len(values) <= MOST_NAMES:
            panel.set_yticks(range(len(values)), values.index.str.slice(0, 16), fontsize=min(7, 170 / len(values)))
            panel.set_ylabel("client")

    alt = f"Map of colours: {label} of {len(values)} clients over {len(values.columns)} rounds."
    return Picture(_svg(draw), title, alt, is_map=True)


def partition(title: str, content: Mapping[str, Any]) -> Picture:
    """Draw the classes and the number of samples of each client.

    Args:
        title: Title of the figure.
        content: Content of ``partition.json``, with the sizes of all clients.
    """
    sizes = {split: np.asarray(counts) for split, counts in content["sizes"].items()}
    histogram, names = content.get("label_histogram"), map(content.get, ("client_names", "class_names"))
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = partition_picture.draw("", sizes, None if histogram is None else np.asarray(histogram), *names)
        svg = as_svg(figure)
    alt = f"Number of samples of each class at each of {max(map(len, sizes.values()))} clients, and of all together."
    return Picture(svg, title, alt)


def unit(metric: str) -> str:
    """Return the label of an axis: the metric with its unit."""
    return f"{metric}, %" if is_share(metric) else metric


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


def _svg(draw: Callable[[Axes], None], size: tuple[float, float] = (4.2, 2.9)) -> str:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        return as_svg(figure)


def as_svg(figure: Figure) -> str:
    """Return a figure as an ``<svg>`` element that takes the width of its container and may stand beside others.

    What a page does not need is left out, since a page of a study has hundreds of figures: matplotlib's own files are
    three times as large.
    """
    for mesh in figure.findobj(QuadMesh):  # a scale of 256 colours would be 256 shapes
        mesh.set_rasterized(True)
    text = svg(figure, "Creator", "Date", "Format", "Type")
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|<defs/>", "", text, flags=re.DOTALL)
    text = re.sub(r'^.*?<svg[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text, count=1, flags=re.DOTALL)
    text = re.sub(r' ?font-family: [^;"]*;?', "", text)  # the page's own font
    # Coordinates are in points; other numbers, such as labels of ticks, stay as they are.
    text = re.sub(r'="[^"]*"', lambda found: re.sub(r"(\d\.\d)\d{3,}", r"\1", found[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    # Ids count in the whole page, so the template puts the figure's place there for this prefix.
    return re.sub(r'( id="|href="#|url\(#)', r"\g<1>FIGURE-", text)
