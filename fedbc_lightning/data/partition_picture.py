"""The picture of a partition, which shows the classes and the number of samples of every client."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbc_lightning.data.datasets import labels_of_classes

MAX_ANNOTATED_CELLS = 400
MAX_NAMED_CLIENTS = 40
# Of more clients than these, so many are drawn: averages over bins of clients would look alike if each has one class.
MAX_ROWS = 150

SPLIT_COLORS = {"train": "#2a6f97", "val": "#f4a259", "test": "#a9d6e5"}


def draw(
    title: str,
    sizes: Mapping[str, np.ndarray],
    histogram: np.ndarray | None,
    names: Sequence[str] | None,
    classes: Sequence[str] | None,
) -> Figure:
    """Draw the classes of each client on the left and its number of samples on the right; a row is a client.

    Of more than 150 clients, 150 are drawn: those at equal distances in the order of their sizes.

    Args:
        title: Text above the picture.
        sizes: Number of samples of each client in ``"train"``, ``"val"`` and ``"test"``, each ``(N,)``.
        histogram: Number of samples of each class at each client, ``(N, num_classes)``; with None only the right part
            is drawn.
        names: Names of the clients; None shows their numbers.
        classes: Names of the classes; None shows their numbers.
    """
    totals = np.sum([*sizes.values()], axis=0)
    label = "client"
    if len(totals) > MAX_ROWS:
        chosen = np.argsort(totals, kind="stable")[(2 * np.arange(MAX_ROWS) + 1) * len(totals) // (2 * MAX_ROWS)]
        label = f"{MAX_ROWS} of the clients, sorted by size"
        totals, sizes = totals[chosen], {split: amounts[chosen] for split, amounts in sizes.items()}
        histogram = None if histogram is None else histogram[chosen]
    num_clients = len(totals)
    height = float(np.clip(1.7 + 0.22 * num_clients, 3.0, 9.5))
    if histogram is None:
        figure = Figure(figsize=(6.4, height), layout="constrained")
        right = figure.add_subplot()
    else:
        width = float(np.clip(2.2 + 0.42 * histogram.shape[1], 4.2, 9.0))
        figure = Figure(figsize=(width + 4.0, height), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[width, 4.0])
        _draw_classes(figure, left, histogram, classes)
    _draw_bars(right, sizes, totals)
    first = figure.axes[0]
    first.set_ylabel(label, fontsize=9)
    first.set_ylim(num_clients - 0.5, -0.5)
    if num_clients <= MAX_NAMED_CLIENTS:
        labels = range(num_clients) if names is None else [name[:24] for name in names]
        # matplotlib would read a formula between two $ of a name.
        first.set_yticks(range(num_clients), [str(label) for label in labels], fontsize=8, parse_math=False)
    elif num_clients == MAX_ROWS:
        first.set_yticks([])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def png(figure: Figure) -> bytes:
    """Return a figure as PNG, drawn only once: ``figure.savefig`` draws it once for the layout, and then again.

    Args:
        figure: A figure, such as that of :func:`draw`.
    """
    figure.set_dpi(150)
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def _draw_classes(figure: Figure, axes: Axes, histogram: np.ndarray, names: Sequence[str] | None) -> None:
    """Draw the samples of each class at each client."""
    (num_clients, num_classes), top = histogram.shape, histogram.max()
    image = axes.imshow(
        np.ma.masked_equal(histogram, 0),
        aspect="auto",
        cmap="GnBu",
        norm=PowerNorm(0.5, -0.15 * top, 1.1 * top),  # one sample can be told from none
        interpolation="nearest",
        extent=(-0.5, num_classes - 0.5, num_clients - 0.5, -0.5),
    )
    _style(axes, "samples of each class", "class")
    axes.set_facecolor("#f5f5f5")
    if num_classes <= 20:
        labels = [name[:12] for name in labels_of_classes(num_classes, names)]
        # Names would run into each other if they did not stand upright
        turned = 90 if max(map(len, labels)) > 3 else 0
        axes.set_xticks(range(num_classes), labels, rotation=turned, parse_math=False)
    axes.vlines(np.arange(num_classes - 1) + 0.5, -0.5, num_clients - 0.5, color="white", linewidth=0.8)
    if num_clients <= 2 * MAX_NAMED_CLIENTS:
        axes.hlines(np.arange(num_clients - 1) + 0.5, -0.5, num_classes - 0.5, color="white", linewidth=0.8)
    if histogram.size <= MAX_ANNOTATED_CELLS:
        for client, label in np.argwhere(histogram):
            count = int(histogram[client, label])
            color = "white" if count > 0.45 * top else "#222222"
            axes.text(label, client, f"{count:,}", ha="center", va="center", fontsize=7, color=color)
        return
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02, aspect=40)
    bar.locator = MaxNLocator(6, integer=True)
    bar.ax.set_ylim(0, top)
    bar.ax.tick_params(labelsize=8, length=0)
    bar.outline.set_visible(False)


def _draw_bars(axes: Axes, sizes: Mapping[str, np.ndarray], totals: np.ndarray) -> None:
    num_clients = len(totals)
    left = np.zeros(num_clients)
    for split, amounts in sizes.items():
        if amounts.any():
            axes.barh(range(num_clients), amounts, 0.8, left, color=SPLIT_COLORS[split], label=split, linewidth=0)
            left = left + amounts
    if num_clients <= MAX_NAMED_CLIENTS:
        for client, size in enumerate(totals):
            axes.annotate(f"{size:,.0f}", (size, client), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_xlim(0, max(totals.max(), 1) * (1.16 if num_clients <= MAX_NAMED_CLIENTS else 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1,
                handlelength=1.0, columnspacing=1.0)  # fmt: skip
    _style(axes, "samples of each client", "samples")
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _style(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(label, fontsize=9)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0, labelsize=8)
