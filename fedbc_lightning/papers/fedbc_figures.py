"""Draws Figures 2 to 4 and 7 to 15 of the FedBC paper from the tables of studies.

A figure is made of panels. A panel selects the finished runs of a study by the levels in the names of their variants,
e.g. "E = 5, C = 1, e = 1.2"; it says so if there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbc_lightning.core.metric_names import TRAIN_LOSS, Measured
from fedbc_lightning.studies.drawing import colors_of, finish, legend_below, panels_of
from fedbc_lightning.studies.results import StudyRecord, finished, rows_of_run
from fedbc_lightning.studies.study_run import Run

ACCURACY, DEVIATION = Measured("accuracy").name, Measured("accuracy", "std").name

# Number of rounds over which a training loss is averaged.
WINDOW = 10

# E of Figures 3a-c and 7e; the paper's value wherever it names no other (appendix D.2).
EPOCHS = "E = 5"

# E of the panels of Figures 7a-d and 8.
OTHER_EPOCHS = ("E = 1", "E = 10", "E = 25", "E = 50")

# Rounds after which Figure 7e shows λ.
ROUNDS = (1, 50, 100, 200)


def figure_2(record: StudyRecord) -> Figure:
    """Draw the accuracy of z on all test data, and of each x_i on its client's data, against a γ that all share.

    Points are the study's algorithms named "FedBC, γ = <number>", with mean and standard deviation over seeds. The
    other algorithms (the paper: "where γ = 0") are horizontal lines at their means over seeds.
    """
    figure, panels = panels_of(2, 4.8, 3.8)
    for panel, place, letter in zip(panels, ("global", "local"), "ab", strict=True):
        swept = {}
        for name, color in colors_of(record.study).items():
            values = [_reported(record, run, Measured("accuracy", place).name) for run in finished(record.states, name)]
            if "γ" in _levels(name):
                swept[float(_levels(name)["γ"])] = values
            elif values:
                panel.axhline(float(np.mean(values)), color=color, label=name, linewidth=1.0, linestyle="--")
        _draw_means(panel, swept, "FedBC", "black")
        finish(panel, "γ of all clients", f"{place} test accuracy", f"({letter}) {place} accuracy")
    legend_below(figure, panels)
    return figure


def figure_3(record: StudyRecord) -> Figure:
    """Draw for E = 5 (a) training loss, (b) coefficients in z, (c) λ_i against n_i; for all E (d) the variance."""
    figure, (loss, coefficient, duals, variance) = panels_of(4, 3.9, 3.9)
    _draw_loss(loss, record, "(a) training loss of the sampled clients", EPOCHS)
    _draw_coefficients(coefficient, record, "(b) smallest and largest client of a round", EPOCHS)
    _draw_duals(duals, record, (), "(c) λ against data")
    variance.set_xscale("log")
    _draw_against(variance, record, "(d) how evenly z serves", "local epochs E", DEVIATION)
    legend_below(figure, [loss, variance])
    return figure


def figure_7(record: StudyRecord) -> Figure:
    """Draw (a)-(d) training loss for E = 1, 10, 25, 50, (e) λ_i against n_i at rounds 1, 50, 100, 200 for E = 5.

    Panel (f) comes from another study, see :func:`figure_7f`.
    """
    figure, (*losses, duals) = panels_of(5, 4.4, 3.6, columns=3)
    for panel, epochs, letter in zip(losses, OTHER_EPOCHS, "abcd", strict=True):
        _draw_loss(panel, record, f"({letter}) {epochs}", epochs)
    _draw_duals(duals, record, ROUNDS, f"(e) λ by round, {EPOCHS}")
    legend_below(figure, losses)
    return figure


def figure_7f(record: StudyRecord) -> Figure:
    """Draw the accuracy of z on all test data against N, as mean and standard deviation over seeds."""
    figure, (panel,) = panels_of(1, 5.2, 4.2)
    _draw_against(panel, record, "", "clients N", ACCURACY)
    legend_below(figure, [panel])
    return figure


def coefficients(record: StudyRecord) -> Figure:
    """Draw the coefficients in z of the smallest and the largest client of each round, in a panel per variant.

    These are Figure 8, for several E, and Figure 13, for several C.
    """
    variants = record.study.variants
    figure, panels = panels_of(len(variants), 4.0, 3.6, sharey=True)
    for panel, variant in zip(panels, variants, strict=True):
        _draw_coefficients(panel, record, variant, variant)
    return figure


def accuracy_by_data(record: StudyRecord) -> Figure:
    """Draw the accuracy of z on the smallest and the largest client of each round, in a panel per algorithm.

    These are Figures 4 and 9 to 12, each for the one E that its study is reduced to.
    """
    figure, panels = panels_of(len(record.study.methods), 3.1, 3.5, sharey=True)
    for panel, method in zip(panels, record.study.methods, strict=True):
        for run in finished(record.states, method.name)[:1]:
            accuracies = run.record.evaluation[["round", "client", ACCURACY]]
            for label, color, chosen in _extremes(run):
                points = chosen.merge(accuracies, on=["round", "client"])
                panel.plot(points["round"], points[ACCURACY], ".", color=color, label=label, alpha=0.5)
        finish(panel, "rounds", "accuracy of z on the client's data", method.name)
    figure.suptitle(", ".join(record.study.variants), fontsize=11)
    legend_below(figure, panels)
    return figure


def variance_by_exponent(record: StudyRecord) -> Figure:
    """Draw the variance over clients of the accuracy of z against the exponent e of their sizes, for C = 1, 2, 3.

    These are Figures 14 and 15, each for the one E that its study is reduced to.
    """
    figure, panels = panels_of(3, 4.2, 4.0, sharey=True)
    for panel, classes in zip(panels, ("C = 1", "C = 2", "C = 3"), strict=True):
        _draw_against(panel, record, ", ".join([*record.study.fixed, classes]), "exponent e", DEVIATION, classes)
    legend_below(figure, panels)
    return figure


# panels


def _draw_loss(panel: Axes, record: StudyRecord, title: str, epochs: str) -> None:
    """Draw the sampled clients' training loss by round: mean over seeds, then over the last :data:`WINDOW` rounds."""
    for name, color in colors_of(record.study).items():
        curves = [run.record.metrics.set_index("round")[TRAIN_LOSS] for run in finished(record.states, name, epochs)]
        if curves:
            mean = pd.concat(curves, axis=1).mean(axis=1).rolling(WINDOW, min_periods=1).mean()
            panel.plot(mean, color=color, label=name, linewidth=1.2)
    finish(panel, "rounds", f"loss, mean of {WINDOW} rounds", title)


def _draw_coefficients(panel: Axes, record: StudyRecord, title: str, *levels: str) -> None:
    """Draw the coefficients in z of the smallest and the largest client of each round of FedBC, in the first seed.

    A coefficient is the client's weight in the mean that forms z: by λ_i as in the run, and by n_i as in FedAvg.
    """
    for run in finished(record.states, "FedBC", *levels)[:1]:
        for label, color, chosen in _extremes(run):
            rounds = chosen["round"]
            panel.plot(rounds, chosen["weight"], color=color, label=f"{label}, by λ", linewidth=1.0)
            panel.plot(rounds, chosen["share"], color=color, label=f"{label}, by n", linewidth=1.0, linestyle=":")
        panel.set_yscale("log")
        panel.legend(fontsize=7)
    finish(panel, "rounds", "coefficient in z", title)


def _draw_duals(panel: Axes, record: StudyRecord, rounds: Sequence[int], title: str) -> None:
    """Draw λ_i against n_i at the given rounds and at the last one, in the first seed of FedBC with E = 5.

    The value of a client is that after its last turn up to the round. A client that has not had a turn by then is left
    out, and so is a round that the run did not reach.
    """
    for run in finished(record.states, "FedBC", EPOCHS)[:1]:
        clients = run.record.clients
        end = clients["round"].max()
        shown = [*(count for count in rounds if count < end), end]
        for count, shade in zip(shown, np.linspace(0, 0.75, len(shown)), strict=True):
            last = clients[clients["round"] <= count].groupby("client").last()
            color = colormaps["plasma"](shade)
            panel.scatter(last["num_samples"], last["dual"], s=16, color=color, label=f"round {count}", alpha=0.8)
        panel.set_xscale("log")
        panel.legend(fontsize=7)
    finish(panel, "samples of the client", "λ", title)


def _draw_against(panel: Axes, record: StudyRecord, title: str, what: str, column: str, *levels: str) -> None:
    """Draw a column of ``metrics.csv`` for all algorithms against a factor, such as E for ``local epochs E``."""
    factor, ticks = what.split()[-1], set[float]()
    for name, color in colors_of(record.study).items():
        found: dict[float, list[float]] = {}
        for run in finished(record.states, name, *levels):
            found.setdefault(float(_levels(run.variant)[factor]), []).append(_reported(record, run, column))
        _draw_means(panel, found, name, color)
        ticks |= set(found)
    if ticks:
        panel.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        panel.minorticks_off()
    finish(panel, what, "global test accuracy" if column == ACCURACY else "variance of accuracy over clients", title)


def _draw_means(panel: Axes, found: Mapping[float, Sequence[float]], label: str, color: str) -> None:
    """Draw means over seeds with their standard deviation as bars and as a shade, as in the paper."""
    if places := sorted(place for place, values in found.items() if values):
        means = np.array([np.mean(found[place]) for place in places])
        spreads = np.array([np.std(found[place], ddof=min(1, len(found[place]) - 1)) for place in places])
        panel.errorbar(places, means, spreads, color=color, label=label, marker="o", markersize=3, capsize=2)
        panel.fill_between(places, means - spreads, means + spreads, color=color, alpha=0.1, linewidth=0)


# what is drawn


def _levels(name: str) -> dict[str, str]:
    """Read factors and levels from the name of a variant or algorithm.

    Example:
        >>> _levels("E = 5, C = 1, e = 1.2"), _levels("FedBC, γ = 0.05"), _levels("FedAvg")
        ({'E': '5', 'C': '1', 'e': '1.2'}, {'γ': '0.05'}, {})
    """
    return dict(part.split(" = ", 1) for part in name.split(", ") if " = " in part)


def _extremes(run: Run) -> list[tuple[str, str, pd.DataFrame]]:
    """Return label, colour and rows of ``clients.csv`` of the smallest and of the largest client of each round.

    As in the paper, these are the sampled clients of a round with the least and the most data, so they differ from one
    round to the next. The column ``share`` is the client's fraction of the round's data.
    """
    sizes = run.record.clients.groupby("round")["num_samples"]
    clients = run.record.clients.assign(share=lambda rows: rows["num_samples"] / sizes.transform("sum"))
    return [("smallest", "C1", clients.loc[sizes.idxmin()]), ("largest", "C0", clients.loc[sizes.idxmax()])]


def _reported(record: StudyRecord, run: Run, column: str) -> float:
    """Return the mean of a column of ``metrics.csv`` over the round, or rounds, that the study reports.

    The paper shows the variance over clients of the accuracy of z, where runs log the standard deviation.
    """
    values = rows_of_run(record.study, run)[column]
    return float((values**2 if column == DEVIATION else values).mean(skipna=False))
