"""FedBC's Figures 2 and 7 to 15: what is drawn is what the runs' tables say, and what was not run is left empty."""

import copy

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import TINY_DATA, run_cli

from fedbc_lightning.papers import fedbc_figures
from fedbc_lightning.studies.results import StudyRecord
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import State

ALL = [*(name for name in dir(fedbc_figures) if name.startswith("figure_")), "coefficients", "accuracy_by_data",
       "variance_by_exponent"]  # fmt: skip


@pytest.fixture
def draw(project, monkeypatch):
    """Draw a figure of a study whose runs are done here, on clients of unequal size, or of a part of it."""
    monkeypatch.syspath_prepend(str(project))
    (project / "tiny_data.py").write_text(TINY_DATA.replace("client, 12)", "client, 12 + 6 * client)"))

    def of(name, study, states, *only):
        part = copy.deepcopy(study)
        part.narrow(only)
        kept = [state for state in states if state.run.variant in part.variants]
        return getattr(fedbc_figures, name)(StudyRecord(part, None, kept))

    return of


def study_of(algorithms, variants, rounds=2, seeds=1):
    return Study("tiny.yaml", algorithms, {"trainer.max_rounds": rounds}, variants, seeds=seeds)


def do(study):
    """The study's runs, one after another in this process."""
    runs = [
        study.run(variant, method, seed)
        for variant in study.variants for method in study.methods for seed in study.seed_list
    ]  # fmt: skip
    assert all(run_cli(*run.words()) == 0 for run in runs)
    return [State(run, "finished") for run in runs]


def table(study, variant, method, name, seed=0):
    (path,) = (study.folder / "runs" / variant / method / f"seed_{seed}").glob(f"*-{seed}/{name}.csv")
    return pd.read_csv(path)


def notes(panel):
    return [text.get_text() for text in panel.texts]


def points(panel, color):
    """x, mean and half the bar's length of the line with this colour."""
    (bars,) = [bars for bars in panel.containers if bars[0].get_color() == color]
    lengths = [(end[1] - start[1]) / 2 for start, end in bars[2][0].get_segments()]
    return list(bars[0].get_xdata()), list(bars[0].get_ydata()), lengths


def test_losses_coefficients_multipliers_and_accuracies_by_round(draw, monkeypatch):
    variants = {f"E = {epochs}": {"trainer.local_epochs": epochs} for epochs in (1, 5, 10)}
    study = study_of({"FedAvg": {}, "FedBC": {"dual_lr": 0.01}}, variants, rounds=6)
    states = do(study)
    monkeypatch.setattr(fedbc_figures, "ROUNDS", (1, 4, 50))

    one, ten, *empty, duals = draw("figure_7", study, states).axes
    assert [line.get_label() for line in one.lines] == ["FedAvg", "FedBC"]
    losses = table(study, "E_=_10", "FedBC", "metrics")["train/loss"]
    assert ten.lines[1].get_ydata()[-1] == pytest.approx(losses.dropna().mean())
    assert [notes(panel) for panel in empty] == [["no finished run"]] * 2
    clients = table(study, "E_=_5", "FedBC", "clients")
    first, fourth, last = [dots.get_offsets() for dots in duals.collections]  # nobody has come to round 50
    assert set(clients[clients["round"] == 6]["dual"]) <= set(last[:, 1])
    assert sorted(first[:, 1]) == sorted(clients[clients["round"] == 1]["dual"])
    until = clients[clients["round"] <= 4].drop_duplicates("client", keep="last").sort_values("client")
    assert np.array_equal(fourth, until[["num_samples", "dual"]])

    panel = draw("coefficients", study, states).axes[2]
    clients = table(study, "E_=_10", "FedBC", "clients")
    by_size = clients.groupby("round")["num_samples"].agg(lambda sizes: sizes.max() / sizes.sum())
    assert [line.get_label() for line in panel.lines[2:]] == ["largest, by λ", "largest, by n"]
    assert list(panel.lines[3].get_ydata()) == pytest.approx(list(by_size))

    fedavg, fedbc = draw("accuracy_by_data", study, states, "E = 10").axes
    assert (fedavg.get_title(), fedbc.get_title()) == ("FedAvg", "FedBC")
    evaluated = table(study, "E_=_10", "FedBC", "evaluation").set_index(["round", "client"])["accuracy/global"]
    smallest = clients.loc[clients.groupby("round")["num_samples"].idxmin()]
    assert smallest["client"].nunique() > 1
    accuracies = [evaluated[place] for place in zip(smallest["round"], smallest["client"], strict=True)]
    assert list(fedbc.lines[0].get_ydata()) == accuracies


def test_variance_and_coefficients_by_classes_and_exponent(draw):
    names = ["E = 5, C = 1, e = 1.1", "E = 5, C = 1, e = 1.2", "E = 1, C = 2, e = 1.5"]
    variants = {name: {"trainer.local_epochs": int(name[4])} for name in names}
    study = study_of({"FedAvg": {}, "FedBC": {"dual_lr": 0.01}}, variants)
    states = do(study)
    one, two = draw("coefficients", study, states, *names[1:]).axes
    weights = table(study, "E_=_5_C_=_1_e_=_1.2", "FedBC", "clients")["weight"]
    assert set(one.lines[0].get_ydata()) <= set(weights)
    assert (len(one.lines), len(two.lines), two.get_title()) == (4, 4, names[2])
    one, two, _ = draw("variance_by_exponent", study, states, *names[:2]).axes
    deviations = [table(study, f"E_=_5_C_=_1_e_=_{e}", "FedAvg", "metrics")["accuracy/std"] for e in (1.1, 1.2)]
    places, means, _ = points(one, "C0")
    assert places == [1.1, 1.2]
    assert means == pytest.approx([column.iloc[-1] ** 2 for column in deviations])
    assert [text.get_text() for text in one.get_xticklabels()] == ["1.1", "1.2"]
    assert notes(two) == ["no finished run"]
    one, two, _ = draw("variance_by_exponent", study, states, names[2]).axes
    assert (notes(one), points(two, "C1")[0]) == (["no finished run"], [1.5])


def test_accuracy_against_clients_and_tolerance(draw):
    variants = {f"N = {count}": {"data.num_clients": count} for count in (4, 7)}
    study = study_of({"FedAvg": {}}, variants)
    (panel,) = draw("figure_7f", study, do(study)).axes
    accuracies = [table(study, f"N_=_{n}", "FedAvg", "metrics")["accuracy/global"].iloc[-1] for n in (4, 7)]
    assert points(panel, "C0") == ([4.0, 7.0], accuracies, [0.0, 0.0])

    swept = {f"FedBC, γ = {value}": {"algorithm": "FedBC", "dual_lr": 1.0, "tolerance": value} for value in (0.5, 0.0)}
    study = study_of({"FedAvg": {}, **swept}, {"all": {}}, seeds=2)
    states = do(study)
    panels = draw("figure_2", study, states).axes
    for panel, place in zip(panels, ("global", "local"), strict=True):
        finals = {
            name: [table(study, "all", name, "metrics", seed)[f"accuracy/{place}"].iloc[-1] for seed in (0, 1)]
            for name in ("FedAvg", "FedBC_γ_=_0.0", "FedBC_γ_=_0.5")
        }
        places, means, bars = points(panel, "black")
        assert places == [0.0, 0.5]
        found = [finals["FedBC_γ_=_0.0"], finals["FedBC_γ_=_0.5"]]
        assert (means, bars) == (pytest.approx(np.mean(found, axis=1)), pytest.approx(np.std(found, axis=1, ddof=1)))
        (level,) = [line for line in panel.lines if line.get_label() == "FedAvg"]
        assert level.get_ydata()[0] == pytest.approx(np.mean(finals["FedAvg"]))
    assert len({name.get_text() for name in panels[0].figure.legends[0].texts}) == 2


@pytest.mark.parametrize("name", ALL)
def test_a_study_without_finished_runs(draw, name):
    assert len(ALL) == 7
    study = study_of({"FedAvg": {}, "FedBC": {"dual_lr": 0.01}}, {"E = 5": {}})
    waiting = [State(study.run("E = 5", study.methods[1], 0))]
    panels = draw(name, study, waiting).axes
    assert [notes(panel) for panel in panels] == [["no finished run"]] * len(panels)
