"""FedBC's Figures 2 and 7 to 15: what is drawn is what the runs' tables say, and what was not run is left empty."""

import copy

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import TINY, TINY_DATA, run_cli
from helpers.folders import only_run

from fedbc_lightning.papers import fedbc_figures
from fedbc_lightning.studies.drawing import COLORS
from fedbc_lightning.studies.results import StudyRecord
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import State

NAMES = [*(name for name in dir(fedbc_figures) if name.startswith("figure_")), "coefficients", "accuracy_by_data",
         "variance_by_exponent"]  # fmt: skip
ALGORITHMS = {"FedAvg": {}, "FedBC": {"dual_lr": 0.01}} | {
    f"FedBC, γ = {value}": {"algorithm": "FedBC", "dual_lr": 1.0, "tolerance": value} for value in (0.5, 0.0)
}
ONE, FIVE, TEN = "E = 1, C = 2, e = 1.5, N = 4", "E = 5, C = 1, e = 1.1, N = 4", "E = 10, C = 1, e = 1.2, N = 7"
VARIANTS = {
    ONE: {"trainer.local_epochs": 1},
    FIVE: {"trainer.local_epochs": 5},
    TEN: {"trainer.local_epochs": 10, "data.num_clients": 7},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A study and its runs, done one after another in this process, on clients of unequal size."""
    folder = tmp_path_factory.mktemp("figures")
    (folder / "unequal_data.py").write_text(TINY_DATA.replace("client, 12)", "client, 12 + 6 * client)"))
    (folder / "tiny.yaml").write_text(TINY.replace("tiny_data", "unequal_data"))
    place = {"base": str(folder / "tiny.yaml"), "out": str(folder / "studies")}
    study = Study(algorithms=ALGORITHMS, overrides={"trainer.max_rounds": 6}, variants=VARIANTS, seeds=1, **place)
    runs = [study.run(variant, method, 0) for variant in study.variants for method in study.methods]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert all(run_cli(*run.words()) == 0 for run in runs)
    return study, [State(run, "finished") for run in runs]


def draw(name, study, states, *only):
    """The panels of a figure of a study, or of some of its variants."""
    part = copy.deepcopy(study)
    part.narrow(only)
    kept = [state for state in states if state.run.variant in part.variants]
    return getattr(fedbc_figures, name)(StudyRecord(part, None, kept)).axes


def table(trained, variant, method, name):
    (run,) = [state.run for state in trained[1] if (state.run.variant, state.run.method) == (variant, method)]
    return pd.read_csv(only_run(run.folder) / f"{name}.csv")


def last_values(trained, method, column):
    """The last value in ``metrics.csv`` of a method's runs, by variant."""
    return [table(trained, variant, method, "metrics")[column].iloc[-1] for variant in VARIANTS]


def notes(panel):
    return [text.get_text() for text in panel.texts]


def points(panel, color):
    """x, mean and half the bar's length of the line with this colour."""
    (bars,) = [bars for bars in panel.containers if bars[0].get_color() == color]
    lengths = [(end[1] - start[1]) / 2 for start, end in bars[2][0].get_segments()]
    return list(bars[0].get_xdata()), list(bars[0].get_ydata()), lengths


def test_losses_and_multipliers_by_round(trained, monkeypatch):
    monkeypatch.setattr(fedbc_figures, "ROUNDS", (1, 4, 50))
    one, ten, *empty, duals = draw("figure_7", *trained)
    assert [line.get_label() for line in one.lines] == list(ALGORITHMS)
    losses = table(trained, TEN, "FedBC", "metrics")["train/loss"]
    assert ten.lines[1].get_ydata()[-1] == pytest.approx(losses.dropna().mean())
    assert [notes(panel) for panel in empty] == [["no finished run"]] * 2
    clients = table(trained, FIVE, "FedBC", "clients")
    first, fourth, last = [dots.get_offsets() for dots in duals.collections]  # nobody has come to round 50
    assert set(clients[clients["round"] == 6]["dual"]) <= set(last[:, 1])
    assert sorted(first[:, 1]) == sorted(clients[clients["round"] == 1]["dual"])
    until = clients[clients["round"] <= 4].drop_duplicates("client", keep="last").sort_values("client")
    assert np.array_equal(fourth, until[["num_samples", "dual"]])


def test_coefficients_and_accuracies_of_the_smallest_and_largest_clients(trained):
    panels = draw("coefficients", *trained)
    assert [panel.get_title() for panel in panels] == list(VARIANTS)
    clients = table(trained, TEN, "FedBC", "clients")
    rounds = clients.groupby("round")
    by_size = rounds["num_samples"].agg(lambda sizes: sizes.max() / sizes.sum())
    assert [line.get_label() for line in panels[2].lines[2:]] == ["largest, by λ", "largest, by n"]
    assert list(panels[2].lines[2].get_ydata()) == list(clients.loc[rounds["num_samples"].idxmax(), "weight"])
    assert list(panels[2].lines[3].get_ydata()) == pytest.approx(list(by_size))

    panels = draw("accuracy_by_data", *trained, TEN)
    assert [panel.get_title() for panel in panels] == list(ALGORITHMS)
    evaluated = table(trained, TEN, "FedBC", "evaluation").set_index(["round", "client"])["accuracy/global"]
    smallest = clients.loc[rounds["num_samples"].idxmin()]
    assert smallest["client"].nunique() > 1
    accuracies = [evaluated[place] for place in zip(smallest["round"], smallest["client"], strict=True)]
    assert list(panels[1].lines[0].get_ydata()) == accuracies


def test_values_against_exponents_clients_and_tolerances(trained):
    one, two, three = draw("variance_by_exponent", *trained)
    places, means, _ = points(one, COLORS[0])
    assert places == [1.1, 1.2]
    assert means == pytest.approx([value**2 for value in last_values(trained, "FedAvg", "accuracy/std")[1:]])
    assert [text.get_text() for text in one.get_xticklabels()] == ["1.1", "1.2"]
    assert (points(two, COLORS[1])[0], notes(three)) == ([1.5], ["no finished run"])

    (panel,) = draw("figure_7f", *trained)
    *of_four, of_seven = last_values(trained, "FedAvg", "accuracy/global")
    expected = [np.mean(of_four), of_seven], [np.std(of_four, ddof=1), 0.0]
    assert points(panel, COLORS[0]) == ([4.0, 7.0], *map(pytest.approx, expected))

    panels = draw("figure_2", *trained)
    for panel, column in zip(panels, ("accuracy/global", "accuracy/local"), strict=True):
        found = [last_values(trained, f"FedBC, γ = {value}", column) for value in (0.0, 0.5)]
        expected = np.mean(found, axis=1), np.std(found, axis=1, ddof=1)
        assert points(panel, "black") == ([0.0, 0.5], *map(pytest.approx, expected))
        (level,) = [line for line in panel.lines if line.get_label() == "FedAvg"]
        assert level.get_ydata()[0] == pytest.approx(np.mean(last_values(trained, "FedAvg", column)))
    assert len({name.get_text() for name in panels[0].figure.legends[0].texts}) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_study_without_finished_runs(name):
    study = Study("tiny.yaml", {"FedAvg": {}, "FedBC": {"dual_lr": 0.01}}, variants={"E = 5": {}}, seeds=1)
    panels = draw(name, study, [State(study.run("E = 5", study.methods[1], 0))])
    assert [notes(panel) for panel in panels] == [["no finished run"]] * len(panels)
