"""FedBC's Figures 3 and 4 from a study's tables: who weighs how much, and how evenly the global model serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedbc_lightning.studies.figures import save
from fedbc_lightning.studies.results import read_metrics
from fedbc_lightning.studies.schedule import State, version_folder
from fedbc_lightning.studies.study import Run, Study

WINDOW = 10
SHOWN = "E = 5"
"""The variant of all panels but Figure 3d."""


def figure_3(study: Study, states: Sequence[State], folder: Path) -> list[Path]:
    """(a) training loss, (b) coefficient of the smallest and the largest client, (c) λ_i against n_i, (d) variance.

    "Smallest" and "largest" are, as in the paper, the sampled clients of a round with the least and the most data;
    their coefficient is their share of the mean that forms z, by λ_i as it was, or by n_i as FedAvg would have it.
    (c) shows each client's λ_i after its last round. (d) is the variance over clients of the accuracy of z on their
    own test data in the last round, for each number of local epochs E: mean and standard deviation over seeds.
    """
    figure = Figure(figsize=(15.5, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    loss, coefficient, weights, variance = figure.subplots(1, 4)
    for place, method in enumerate(study.methods):
        curves = [_metrics(run).set_index("round")["train_loss"] for run in _runs(states, SHOWN, method.name)]
        if curves:
            mean = pd.concat(curves, axis=1).mean(axis=1).rolling(WINDOW, min_periods=1).mean()
            loss.plot(mean, color=f"C{place}", label=method.name, linewidth=1.2)
        _draw_variance(variance, study, states, method.name, f"C{place}")
    _label(loss, "round", f"loss, mean of {WINDOW} rounds", "(a) training loss of the sampled clients")
    loss.legend(fontsize=8)
    found = _runs(states, SHOWN, "FedBC")
    if found:
        clients = _clients(found[0])
        by_round = clients.groupby("round")
        sizes, totals = by_round["num_samples"], by_round["num_samples"].sum().to_numpy()
        for name, rows, color in (("smallest", sizes.idxmin(), "C1"), ("largest", sizes.idxmax(), "C0")):
            chosen = clients.loc[rows]
            by_size, rounds = chosen["num_samples"].to_numpy() / totals, chosen["round"]
            coefficient.plot(rounds, chosen["weight"], color=color, label=f"{name}, by λ", linewidth=1.0)
            coefficient.plot(rounds, by_size, color=color, label=f"{name}, by n", linewidth=1.0, linestyle=":")
        coefficient.set_yscale("log")
        coefficient.legend(fontsize=7)
        last = clients.groupby("client").last()
        weights.scatter(last["num_samples"], last["dual"], s=16, color="C4")
        weights.set_xscale("log")
    _label(coefficient, "round", "coefficient in z", "(b) smallest and largest client of a round")
    _label(weights, "samples of the client", "λ at the end", "(c) λ against data")
    _label(variance, "local epochs E", "variance of accuracy over clients", "(d) how evenly z serves")
    variance.set_xscale("log")
    variance.set_xticks(_epochs(study), [str(epochs) for epochs in _epochs(study)], minor=False)
    variance.minorticks_off()
    return save(figure, folder, "figure3")


def figure_4(study: Study, states: Sequence[State], folder: Path) -> list[Path]:
    """Accuracy of the global model on the test data of the clients with the least and with the most data, by round."""
    figure = Figure(figsize=(3.1 * len(study.methods) + 0.4, 3.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(study.methods), sharey=True, squeeze=False)[0]
    for panel, method in zip(panels, study.methods, strict=True):
        found = _runs(states, SHOWN, method.name)
        if found:
            metrics = _metrics(found[0])
            for name, column, color in (("least data", "least", "C1"), ("most data", "most", "C0")):
                values = metrics[f"fairness/accuracy_{column}_data"]
                panel.plot(metrics["round"], values, color=color, label=name, linewidth=0.9)
        _label(panel, "round", "", method.name)
    panels[0].set_ylabel("accuracy of z on the client's data")
    panels[0].legend(fontsize=8)
    return save(figure, folder, "figure4")


def _runs(states: Sequence[State], variant: str, name: str) -> list[Run]:
    """The finished runs of an algorithm in a variant, in the order of seeds."""
    return [s.run for s in states if s.status == "finished" and (s.run.variant, s.run.method) == (variant, name)]


def _metrics(run: Run) -> pd.DataFrame:
    metrics = read_metrics(run)
    assert metrics is not None  # it is finished
    return metrics


def _clients(run: Run) -> pd.DataFrame:
    folder = version_folder(run)
    assert folder is not None
    return pd.read_csv(folder / "clients.csv")


def _epochs(study: Study) -> list[int]:
    return [(overrides or {})["trainer.local_epochs"] for overrides in study.variants.values()]


def _draw_variance(panel: Axes, study: Study, states: Sequence[State], name: str, color: str) -> None:
    epochs, means, spreads = [], [], []
    for variant, num_epochs in zip(study.variants, _epochs(study), strict=True):
        runs = _runs(states, variant, name)
        finals = [_metrics(run)["fairness/accuracy_std"].dropna().iloc[-1] ** 2 for run in runs]
        if finals:
            epochs.append(num_epochs)
            means.append(np.mean(finals))
            spreads.append(np.std(finals, ddof=1) if len(finals) > 1 else 0.0)
    panel.errorbar(epochs, means, yerr=spreads, color=color, marker="o", markersize=3, linewidth=1.2, capsize=2)


def _label(panel: Axes, x: str, y: str, title: str) -> None:
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)
