"""Draws Figures 2 to 4 and 7 to 15 of the FedBC paper from the tables of studies.

A figure is made of panels. A panel selects the finished runs of a study by the levels in the names of their variants,
e.g. "E = 5, C = 1, e = 1.2"; it says so if there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes

from fedbc_lightning.core.metric_names import TRAIN_LOSS, Measured
from fedbc_lightning.studies.drawing import colors_of, finish, legend_below, panels_of, save
from fedbc_lightning.studies.results import finished, rows_of_run
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run, State

ACCURACY = Measured("accuracy").name

# Number of rounds over which a training loss is averaged.
WINDOW = 10

# E of Figures 3a-c, 4 and 7e; the paper's value wherever it names no other (appendix D.2).
EPOCHS = "5"

# E of the panels of Figures 7a-d and 8.
OTHER_EPOCHS = ("1", "10", "25", "50")

# Rounds after which Figure 7e shows λ.
ROUNDS = (1, 50, 100, 200)

# C, the number of classes per client, of the panels of Figures 13 to 15.
CLASSES = ("1", "2", "3")


def figure_2(study: Study, states: Sequence[State], folder: Path) -> list[Path]:
    """Draw the accuracy of z on all test data, and of each x_i on its client's data, against a γ that all share.

    Points are the study's algorithms named "FedBC, γ = <number>", with mean and standard deviation over seeds. The
    other algorithms (the paper: "where γ = 0") are horizontal lines at their means over seeds.
    """
    figure, panels = panels_of(1, 2, 4.8, 3.8)
    for panel, place, letter in zip(panels, ("global", "local"), "ab", strict=True):
        measure = partial(_reported, study, Measured("accuracy", place).name)
        swept: dict[float, list[float]] = {}
        for name, color in _algorithms(study):
            values = [measure(run) for run in _runs(states, name)]
            if "γ" in _levels(name):
                swept[float(_levels(name)["γ"])] = values
            elif values:
                panel.axhline(float(np.mean(values)), color=color, label=name, linewidth=1.0, linestyle="--")
        _draw_means(panel, swept, "FedBC", "black")
        finish(panel, "γ of all clients", f"{place} test accuracy", f"({letter}) {place} accuracy")
    legend_below(figure, panels)
    return save(figure, folder, "figure2")


def figure_3(study: Study, states: Sequence[State], folder: Path) -> list[Path]:
    """Draw for E = 5 (a) training loss, (b) coefficients in z, (c) λ_i against n_i; for all E (d) the variance."""
    figure, (loss, coefficient, duals, variance) = panels_of(1, 4, 3.9, 3.9)
    _draw_loss(loss, study, states, "(a) training loss of the sampled clients", E=EPOCHS)
    _draw_coefficients(coefficient, states, "(b) smallest and largest client of a round", E=EPOCHS)
    _draw_duals(duals, states, (), "(c) λ against data", E=EPOCHS)
    variance.set_xscale("log")
    _draw_against(variance, "E", study, states, partial(_variance, study))
    finish(variance, "local epochs E", "variance of accuracy over clients", "(d) how evenly z serves")
    legend_below(figure, [loss, variance])
    return save(figure, folder, "figure3")


def figure_7(study: Study, states: Sequence[State], folder: Path) -> list[Path]:
    """Draw (a)-(d) training loss for E = 1, 10, 25, 50, (e) λ_i against n_i at rounds 1, 50, 100, 200 for E = 5.

    Panel (f) comes from another study, see :func:`figure_7f`.
    """
    figure, (*losses, duals, rest) = panels_of(2, 3, 4.4, 3.6)
    for panel, epochs, letter in zip(losses, OTHER_EPOCHS, "abcd", strict=True):
        _draw_loss(panel, study, states, f"({letter}) E = {epochs}", E=epochs)
    _draw_duals(duals, states, ROUNDS, f"(e) λ by round, E = {EPOCHS}", E=EPOCHS)
    rest.remove()
    legend_below(figure, losses)
    return save(figure, folder, "figure7")


def figure_7f(study: Study, states: Sequence[State], folder: Path) -> list[Path]:
    """Draw the accuracy of z on all test data against N, as mean and standard deviation over seeds."""
    figure, (panel,) = panels_of(1, 1, 5.2, 4.2)
    _draw_against(panel, "N", study, states, partial(_reported, study, ACCURACY))
    finish(panel, "clients N", "global test accuracy", "")
    legend_below(figure, [panel])
    return save(figure, folder, "figure7f")


def _figure_of_coefficients(
    study: Study, states: Sequence[State], folder: Path, *, name: str, levels: Mapping[str, dict[str, str]]
) -> list[Path]:
    """Draw the coefficients in z of the smallest and the largest client of each round, in a panel per title."""
    figure, panels = panels_of(1, len(levels), 4.0, 3.6, sharey=True)
    for panel, (title, chosen), letter in zip(panels, levels.items(), "abcd", strict=False):
        _draw_coefficients(panel, states, f"({letter}) {title}", **chosen)
        panel.label_outer()
    return save(figure, folder, name)


figure_8 = partial(_figure_of_coefficients, name="figure8", levels={f"E = {E}": {"E": E} for E in OTHER_EPOCHS})
figure_13 = partial(
    _figure_of_coefficients, name="figure13", levels={f"C = {C}": {"E": "5", "C": C, "e": "1.2"} for C in CLASSES}
)


def _figure_by_data(study: Study, states: Sequence[State], folder: Path, *, name: str, epochs: str) -> list[Path]:
    """Draw the accuracy of z on the smallest and the largest client of each round, in a panel per algorithm."""
    figure, panels = panels_of(1, len(study.methods), 3.1, 3.5, sharey=True)
    for panel, method in zip(panels, study.methods, strict=True):
        for run in _runs(states, method.name, E=epochs)[:1]:
            accuracies = run.record.evaluation[["round", "client", ACCURACY]]
            for label, color, chosen in _extremes(run):
                points = chosen.merge(accuracies, on=["round", "client"])
                panel.plot(points["round"], points[ACCURACY], ".", color=color, label=label, alpha=0.5)
        finish(panel, "round", "accuracy of z on the client's data", method.name)
        panel.label_outer()
    figure.suptitle(f"E = {epochs}", fontsize=11)
    legend_below(figure, panels)
    return save(figure, folder, name)


figure_4 = partial(_figure_by_data, name="figure4", epochs=EPOCHS)
figure_9 = partial(_figure_by_data, name="figure9", epochs="1")
figure_10 = partial(_figure_by_data, name="figure10", epochs="10")
figure_11 = partial(_figure_by_data, name="figure11", epochs="25")
figure_12 = partial(_figure_by_data, name="figure12", epochs="50")


def _figure_of_variance(study: Study, states: Sequence[State], folder: Path, *, name: str, epochs: str) -> list[Path]:
    """Draw the variance over clients of the accuracy of z against the exponent e of their sizes, for C = 1, 2, 3."""
    figure, panels = panels_of(1, 3, 4.2, 4.0, sharey=True)
    for panel, classes, letter in zip(panels, CLASSES, "abc", strict=True):
        _draw_against(panel, "e", study, states, partial(_variance, study), E=epochs, C=classes)
        finish(panel, "exponent e", "variance of accuracy over clients", f"({letter}) C = {classes}, E = {epochs}")
        panel.label_outer()
    legend_below(figure, panels)
    return save(figure, folder, name)


figure_14 = partial(_figure_of_variance, name="figure14", epochs="1")
figure_15 = partial(_figure_of_variance, name="figure15", epochs="5")


# panels


def _draw_loss(panel: Axes, study: Study, states: Sequence[State], title: str, **levels: str) -> None:
    """Draw the sampled clients' training loss by round: mean over seeds, then over the last :data:`WINDOW` rounds."""
    for name, color in _algorithms(study):
        curves = [run.record.metrics.set_index("round")[TRAIN_LOSS] for run in _runs(states, name, **levels)]
        if curves:
            mean = pd.concat(curves, axis=1).mean(axis=1).rolling(WINDOW, min_periods=1).mean()
            panel.plot(mean, color=color, label=name, linewidth=1.2)
    finish(panel, "round", f"loss, mean of {WINDOW} rounds", title)


def _draw_coefficients(panel: Axes, states: Sequence[State], title: str, **levels: str) -> None:
    """Draw the coefficients in z of the smallest and the largest client of each round of FedBC, in the first seed.

    A coefficient is the client's weight in the mean that forms z: by λ_i as in the run, and by n_i as in FedAvg.
    """
    for run in _runs(states, "FedBC", **levels)[:1]:
        for label, color, chosen in _extremes(run):
            rounds = chosen["round"]
            panel.plot(rounds, chosen["weight"], color=color, label=f"{label}, by λ", linewidth=1.0)
            panel.plot(rounds, chosen["share"], color=color, label=f"{label}, by n", linewidth=1.0, linestyle=":")
        panel.set_yscale("log")
        panel.legend(fontsize=7)
    finish(panel, "round", "coefficient in z", title)


def _draw_duals(panel: Axes, states: Sequence[State], rounds: Sequence[int], title: str, **levels: str) -> None:
    """Draw λ_i against n_i at the given rounds (none: at the last round), in the first seed of FedBC.

    The value of a client is that after its last turn up to the round. A client that has not had a turn by then is left
    out, and so is a round that the run did not reach.
    """
    for run in _runs(states, "FedBC", **levels)[:1]:
        clients = run.record.clients
        end = clients["round"].max()
        reached = [count for count in rounds if count <= end]
        for place, count in enumerate(reached or [end]):
            last = clients[clients["round"] <= count].groupby("client").last()
            color = colormaps["plasma"](place / len(reached)) if reached else "C4"
            panel.scatter(last["num_samples"], last["dual"], s=16, color=color, label=f"round {count}", alpha=0.8)
        panel.set_xscale("log")
        panel.legend(fontsize=7)
    finish(panel, "samples of the client", "λ", title)


def _draw_against(
    panel: Axes,
    factor: str,
    study: Study,
    states: Sequence[State],
    measure: Callable[[Run], float],
    **levels: str,
) -> None:
    """Draw a number of each run against the level of a factor, for all algorithms."""
    ticks = set[float]()
    for name, color in _algorithms(study):
        found: dict[float, list[float]] = {}
        for run in _runs(states, name, **levels):
            if factor in _levels(run.variant):
                found.setdefault(float(_levels(run.variant)[factor]), []).append(measure(run))
        _draw_means(panel, found, name, color)
        ticks |= set(found)
    if ticks:
        panel.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        panel.minorticks_off()


def _draw_means(panel: Axes, found: Mapping[float, Sequence[float]], label: str, color: str) -> None:
    """Draw means over seeds with their standard deviation as bars and as a shade, as in the paper."""
    places = sorted(place for place, values in found.items() if values)
    if not places:
        return
    means = np.array([np.mean(found[place]) for place in places])
    spreads = np.array([np.std(found[place], ddof=1) if len(found[place]) > 1 else 0.0 for place in places])
    panel.errorbar(places, means, spreads, color=color, label=label, marker="o", markersize=3, linewidth=1.2, capsize=2)
    panel.fill_between(places, means - spreads, means + spreads, color=color, alpha=0.1, linewidth=0)


# what is drawn


def _algorithms(study: Study) -> list[tuple[str, str]]:
    """Return names and colours; a colour stays the same if only some of the study's algorithms are run."""
    colors = colors_of(study)
    return [(method.name, colors[method.name]) for method in study.methods]


def _levels(name: str) -> dict[str, str]:
    """Read factors and levels from the name of a variant or algorithm.

    Example:
        >>> _levels("E = 5, C = 1, e = 1.2"), _levels("FedBC, γ = 0.05"), _levels("FedAvg")
        ({'E': '5', 'C': '1', 'e': '1.2'}, {'γ': '0.05'}, {})
    """
    return {factor: level for factor, equals, level in (part.partition(" = ") for part in name.split(", ")) if equals}


def _runs(states: Sequence[State], name: str, **levels: str) -> list[Run]:
    """Return the finished runs of an algorithm in the variants with these levels, ordered by seed."""
    mine = [run for run in finished(states) if run.method == name]
    return [run for run in mine if levels.items() <= _levels(run.variant).items()]


def _extremes(run: Run) -> list[tuple[str, str, pd.DataFrame]]:
    """Return label, colour and rows of ``clients.csv`` of the smallest and of the largest client of each round.

    As in the paper, these are the sampled clients of a round with the least and the most data, so they differ from one
    round to the next. The column ``share`` is the client's fraction of the round's data.
    """
    sizes = run.record.clients.groupby("round")["num_samples"]
    clients = run.record.clients.assign(share=lambda rows: rows["num_samples"] / sizes.transform("sum"))
    return [("smallest", "C1", clients.loc[sizes.idxmin()]), ("largest", "C0", clients.loc[sizes.idxmax()])]


def _reported(study: Study, column: str, run: Run) -> float:
    """Return the mean of a column of ``metrics.csv`` over the round, or rounds, that the study reports."""
    return float(rows_of_run(study, run)[column].mean(skipna=False))


def _variance(study: Study, run: Run) -> float:
    """Return the variance over clients of the accuracy of z on their test data, in the reported round or rounds."""
    reported = rows_of_run(study, run)
    return float((reported[Measured("accuracy", "std").name] ** 2).mean(skipna=False))
