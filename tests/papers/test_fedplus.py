"""Fed+'s table and figures: what is shipped says what the paper says, and what is drawn is what the runs did."""

import pandas as pd
import pytest
from helpers.command_line import run_cli
from helpers.folders import only_run

from fedbc_lightning import ConfigurationError
from fedbc_lightning.commands.studies import read_study
from fedbc_lightning.core.metric_names import is_lower_better
from fedbc_lightning.papers.fedplus_figures import figure_1, figure_2, figure_3, figure_4, loss_along_line
from fedbc_lightning.studies.compare import Comparison
from fedbc_lightning.studies.results import StudyRecord
from fedbc_lightning.studies.study import Study

pytestmark = pytest.mark.usefixtures("forked_workers")
MOVES = "AggregationMoves"
METHODS = {
    "FedAvg": {},
    "FedAvg+": {"sigma": 1.0},
    "l = 0.25": {"algorithm": "FedAvg+", "sigma": 1.0, "mixing": 0.25},
    "l = 1": {"algorithm": "FedAvg+", "sigma": 1.0, "mixing": 1.0},
    "No fusion": {"algorithm": "Local"},
}


@pytest.mark.parametrize(
    ("name", "num_runs"),
    [
        ("fedplus_table2_mnist", 4 * 7),
        ("fedplus_table2_regression", 7),
        ("fedplus_figures", 2 * 8),
        ("fedplus_figure4_sent140", 7),
    ],
)
def test_the_shipped_studies_are_the_papers(name, num_runs):
    study = read_study("compare", ["--config", f"studies/{name}.yaml"])
    assert len(study.variants) * len(study.methods) == num_runs
    for paper in study.papers.values():
        for claim in paper.claims:
            for other in claim.than:
                for levels in study.levels.values():
                    gain = paper.mean(claim.better, levels) - paper.mean(other, levels)
                    assert gain < 0 if is_lower_better(paper.metric) else gain > 0


@pytest.fixture
def comparison(project, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    settings = {"trainer.max_rounds": 3, "trainer.clients_per_round": 4, "trainer.callbacks": MOVES}
    comparison = Comparison(Study("tiny.yaml", METHODS, settings, seeds=1, workers=1))
    assert comparison.run()
    return comparison


def test_what_the_runs_leave_and_what_is_drawn_of_it(comparison):
    runs = {s.run.method: only_run(s.run.folder) for s in comparison.states}
    tables = {name: pd.read_csv(folder / "clients.csv") for name, folder in runs.items()}
    second = {name: table[table["round"] == 2].set_index("client") for name, table in tables.items()}
    moved = {name: table["train_moved_by_server"] for name, table in second.items()}
    assert (moved["FedAvg"] > 0.01).all()
    for name in ("FedAvg+", "No fusion"):  # they go on from where they were
        assert (tables[name]["train_moved_by_server"] == 0).all()
        assert (tables[name]["train_moved_by_training"] > 0.01).all()
    # all l have the same first round, and the second begins l of the way to z
    assert moved["l = 0.25"].to_numpy() * 4 == pytest.approx(moved["l = 1"].to_numpy(), rel=1e-4)

    line = loss_along_line(runs["FedAvg+"], [2, 0]).set_index(["client", "share"])["loss"]
    evaluated = pd.read_csv(runs["FedAvg+"] / "evaluation.csv")
    last = evaluated[evaluated["round"] == 3].set_index("client")
    for client in (0, 2):
        assert line[client, 0.0] == pytest.approx(last["loss/local"][client])
        assert line[client, 1.0] == pytest.approx(last["loss/global"][client])
        assert line[client, 0.5] < (line[client, 0.0] + line[client, 1.0]) / 2  # the loss is convex

    record = StudyRecord(comparison.study, None, comparison.states)
    moves, performance, lines, by_round = (draw(record).axes for draw in (figure_1, figure_2, figure_3, figure_4))
    assert [panel.get_title() for panel in moves] == list(METHODS)
    assert list(moves[0].lines[1].get_xdata()) == [2, 3]  # a first round has nothing to be replaced
    assert moves[0].lines[1].get_ydata()[0] == pytest.approx(moved["FedAvg"].mean())
    before, after = performance[1].lines
    assert list(before.get_ydata()) == list(after.get_ydata())
    before, after = performance[0].lines
    assert list(before.get_ydata()) != list(after.get_ydata())
    solid = [line for line in lines[1].lines if line.get_linestyle() == "-"]
    assert len(solid) == 3
    (panel,) = by_round
    assert [line.get_label() for line in panel.lines] == list(METHODS)
    assert list(panel.lines[0].get_ydata()) == list(after.get_ydata())


def test_models_that_are_not_kept(project, capfd):
    words = ["fit", "--config", "tiny.yaml", "--trainer.keep_local_models", "false"]
    assert run_cli(*words, "--trainer.callbacks", MOVES) == 1
    assert "trainer.keep_local_models: the clients' models are not kept" in capfd.readouterr().err
    assert run_cli(*words) == 0
    with pytest.raises(ConfigurationError, match="the clients' models are not kept"):
        loss_along_line(project / "runs/tiny/FedAvg-0", [0])
