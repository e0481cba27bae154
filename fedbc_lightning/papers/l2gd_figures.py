"""Draws Figures 1 to 5 of "Federated Learning of a Mixture of Global and Local Models" from two studies' runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fedbc_lightning.papers.l2gd_problem import ERROR, TO_GLOBAL, TO_LOCAL, MixtureProblem
from fedbc_lightning.studies.drawing import finish, panels_of
from fedbc_lightning.studies.parsed_runs import data_of
from fedbc_lightning.studies.results import StudyRecord, finished
from fedbc_lightning.studies.study_run import Run

# Relative error at which Figure 2 of the paper counts communications.
GOAL = 1e-5
# Values of λ in Figure 1.
PENALTIES = np.geomspace(1e-4, 1e2, 37)
# Largest number of points of a curve in Figures 3 and 4; each is the mean of a window of communications.
MAX_POINTS = 50
COLORS = {"L2SGD+": "#c1121f", "L2SGD2": "#7b2cbf", "L2SGD": "#2a6f97"}
RELATIVE_ERROR = "(F(xᵏ) − F*) / (F(0) − F*)"


def figure_1(record: StudyRecord) -> Figure:
    """Draw the distance of x(λ) to the local solution x(0) and to the global one x(∞) against λ, on each split.

    Lines are minimisers found by Newton's method on the data of the first run. Points are the ends of the runs of
    L2SGD+. The paper's text does not name the norm; here it is the root mean square over clients of ‖x_i(λ) − x_i‖.
    """
    splits = _splits(record)
    figure, panels = panels_of(len(splits), 5.2, 4.0)
    for panel, split in zip(panels, splits, strict=True):
        runs = finished(record.states, "L2SGD+", split)
        problem = read_problem(runs[0])
        lines = [problem.distances(problem.with_penalty(penalty).minimiser) for penalty in PENALTIES]
        ends = pd.DataFrame([run.record.metrics.iloc[-1] for run in runs])
        names = (("to the local models x(0)", TO_LOCAL, "C0"), ("to the global model x(∞)", TO_GLOBAL, "C1"))
        for (label, column, color), values in zip(names, zip(*lines, strict=True), strict=True):
            panel.plot(PENALTIES, values, color=color, label=label)
            panel.plot([run.settings["algorithm.penalty"] for run in runs], ends[column], "o", color=color)
        panel.plot([], [], "o", color="0.4", label="ends of runs of L2SGD+")
        panel.set_xscale("log")
        finish(panel, "λ", "distance of x(λ)", split)
    panels[0].legend(fontsize=8)
    return figure


def figure_2(record: StudyRecord) -> Figure:
    """Draw against p the communications and a client's local steps that L2SGD+ needs to a relative error of 1e-5.

    Points are means over seeds with their range; runs that do not reach the error are left out. Dotted lines are the
    theorem's bounds, p(1 − p)N/(α(p)μ) and (1 − p)N/(α(p)μ), scaled to meet the runs next to p*. The dashed line is p*.
    By the bounds communications hardly change below p* and are proportional to p above: p* needs about the fewest, and
    of all p that need so few it takes the fewest local steps. The paper shows communications only.
    """
    problems = {split: read_problem(finished(record.states, None, split)[0]) for split in _splits(record)}
    ticks = sorted({_probability(run) for run in finished(record.states)})
    figure, panels = panels_of(2, 5.2, 4.0)
    for panel, what in zip(panels, ("communications", "local steps"), strict=True):
        for place, (split, problem) in enumerate(problems.items()):
            runs = finished(record.states, None, split)
            costs = pd.Series({(_probability(run), run.seed): cost_of(run).get(what) for run in runs}, dtype=float)
            found = costs.dropna().groupby(level=0).agg(["mean", "min", "max"])
            best, p, mean = problem.best_probability, found.index.to_numpy(), found["mean"].to_numpy()
            panel.axvline(best, color="0.5", linewidth=0.9, linestyle="--")
            if len(p):
                spread = np.stack([mean - found["min"], found["max"] - mean])
                panel.errorbar(p, mean, spread, fmt="os^D"[place % 4], color=f"C{place}", capsize=2, label=split)
                line, nearest = np.geomspace(p.min(), p.max(), 200), np.argmin(np.abs(np.log(p / best)))
                scale = mean[nearest] / problem.bound(p[nearest], GOAL, what)
                panel.plot(line, [scale * problem.bound(q, GOAL, what) for q in line], ":", color=f"C{place}")
                panel.legend(fontsize=8)
        finish(panel, "p", "", f"L2SGD+: {what} to {GOAL:g}, p* = {best:.3f}")
        panel.set(xscale="log", yscale="log")
        panel.set_xticks(ticks, [f"{p:.3f}" for p in ticks], fontsize=8, rotation=45)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.yaxis.set_minor_locator(NullLocator())
        panel.margins(y=0.2)
    return figure


def figure_3(record: StudyRecord) -> Figure:
    """Draw the error of L2SGD+, L2SGD2 and L2SGD with the same p and α against communications and local steps.

    L2SGD+ converges linearly, the others stop at a floor. Dotted lines are the floors of theory, MixtureProblem.floor.
    """
    whats = "communications", "local steps of a client"
    return _figure_of_methods(record, [(split, what) for split in _splits(record) for what in whats])


def figure_4(record: StudyRecord) -> Figure:
    """Draw variance-reduced (L2SGD+), shifted (L2SGD2) and plain local SGD (L2SGD) on both splits.

    The x axis counts communications. The paper shows several LibSVM files; this figure shows that of the study.
    """
    return _figure_of_methods(record, [(split, "communications") for split in _splits(record)])


def figure_5(record: StudyRecord) -> Figure:
    """Draw L2SGD+ with several p and the theorem's α(p) on each split, in the first seed; p* is red with triangles."""
    splits = _splits(record)
    figure, panels = panels_of(len(splits), 5.2, 4.0, sharey=True)
    for panel, split in zip(panels, splits, strict=True):
        every = finished(record.states, None, split)
        runs = sorted((run for run in every if run.seed == every[0].seed), key=_probability)
        best = read_problem(runs[0]).best_probability
        nearest = min(runs, key=lambda run: abs(math.log(_probability(run) / best)))
        for run, shade in zip(runs, np.linspace(0.0, 0.85, len(runs)), strict=True):
            values, factor = errors_of(run), _probability(run) / best
            style = {"color": colormaps["viridis"](shade), "linewidth": 1.0}
            if run is nearest:
                style = {"color": "#c1121f", "linestyle": ":", "linewidth": 2.0, "marker": "^", "zorder": 3}
            label = f"{_probability(run):.3f} = {factor:.2g} p*"
            panel.semilogy(values, label=label, markevery=max(1, len(values) // 10), markersize=4, **style)
        finish(panel, "communications", RELATIVE_ERROR, split)
        panel.legend(title="p", fontsize=8, title_fontsize=8)
    return figure


# what a run gave


def read_problem(run: Run) -> MixtureProblem:
    """Return the problem that a run of a study has minimised."""
    settings = run.settings
    return MixtureProblem.of_clients(data_of(run), settings["model.weight_decay"], settings["algorithm.penalty"])


def errors_of(run: Run) -> np.ndarray:
    """Return the relative error after 0, 1, 2, ... communications."""
    return np.concatenate([[1.0], 10 ** run.record.metrics[ERROR].to_numpy()[1:]])


def cost_of(run: Run) -> dict[str, int]:
    """Return the communications and a client's local steps until GOAL; nothing if the run does not end below it.

    The end counts because a run that has stopped at a floor may pass the goal for a moment.
    """
    errors = errors_of(run)
    count = int(np.argmax(errors <= GOAL))
    return {"communications": count, "local steps": int(_local_steps(run)[count])} if errors[-1] <= GOAL else {}


def _local_steps(run: Run) -> np.ndarray:
    """Return the number of a client's local steps after 0, 1, 2, ... communications."""
    return run.record.metrics["coin/local_steps"].fillna(0).cumsum().to_numpy()


def _splits(record: StudyRecord) -> list[str]:
    """Return the splits of the data: the levels of the first factor, or the variants if there are no factors."""
    return list(dict.fromkeys(run.variant.partition(", ")[0] for run in finished(record.states)))


def _probability(run: Run) -> float:
    return float(run.settings["algorithm.probability"])


# drawing


def _figure_of_methods(record: StudyRecord, shown: Sequence[tuple[str, str]]) -> Figure:
    """Draw the methods' errors in a panel for each split of the data and label of the horizontal axis."""
    figure, panels = panels_of(len(shown), 5.2, 4.0, sharey=True)
    for panel, (split, what) in zip(panels, shown, strict=True):
        problem = read_problem(finished(record.states, None, split)[0])
        for method, color in COLORS.items():
            if runs := finished(record.states, method, split):
                _draw_method(panel, problem, method, color, runs, by_steps=what != "communications")
        finish(panel, what, RELATIVE_ERROR, split)
    panels[0].legend(fontsize=8)
    return figure


def _draw_method(
    panel: Axes, problem: MixtureProblem, method: str, color: str, runs: Sequence[Run], *, by_steps: bool
) -> None:
    """Draw the mean of a method's error over windows and seeds with their range, and its floor by theory dotted."""
    curves = np.stack([errors_of(run) for run in runs])
    windows = np.array_split(np.arange(curves.shape[1]), min(MAX_POINTS, curves.shape[1]))
    ends = np.mean([_local_steps(run) for run in runs], axis=0) if by_steps else np.arange(curves.shape[1])
    x = [ends[window[-1]] for window in windows]
    panel.semilogy(x, [curves[:, window].mean() for window in windows], color=color, linewidth=1.4, label=method)
    low, high = ([bound(curves[:, window]) for window in windows] for bound in (np.min, np.max))
    panel.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    floor = problem.floor(method, _probability(runs[0]), float(runs[0].settings["algorithm.lr"]))
    if floor:
        panel.axhline(floor, color=color, linewidth=1.2, linestyle=":", label=f"{method}, floor of theory")
