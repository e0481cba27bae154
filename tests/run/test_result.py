"""What `fit` returns: tables of the run, the best round, and how both are shown."""

import shutil
from dataclasses import FrozenInstanceError

import matplotlib as mpl
import pandas as pd
import pytest
import torch
from helpers.boring import BoringData, BoringModel, make_model, make_trainer
from lightning.pytorch import Callback

from fedbc_lightning import ConfigurationError, FedAvg, FitResult
from fedbc_lightning.callbacks import RoundCheckpoint

GLOBAL, LOCAL, WORST = "accuracy/global", "accuracy/local", "accuracy/worst10"
LOSS, VAL_LOSS, TRAIN_LOSS = "loss/global", "loss/val_global", "train/loss"

mpl.use("agg")


@pytest.fixture(autouse=True)
def _close_figures():
    from matplotlib import pyplot

    yield
    pyplot.close("all")


def fit(folder, ckpt_path=None, model=None, data=None, **settings):
    return make_trainer(folder, **settings).fit(model or make_model(), data or BoringData(), FedAvg(), ckpt_path)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("result") / "runs")


def test_the_tables_are_those_in_the_folder(result):
    assert list(result.history.index) == [0, 1, 2, 3]
    assert result.history.index.name == "round"
    for table, name in ((result.history.reset_index(), "metrics"), (result.clients, "clients")):
        pd.testing.assert_frame_equal(table, pd.read_csv(result.folder / f"{name}.csv"))
    assert len(result.clients) == 3 * 3
    assert len(result.evaluation) == 4 * 6
    assert result.checkpoint == result.folder / "checkpoints" / "last.ckpt"
    with pytest.raises(FrozenInstanceError):
        result.folder = result.folder.parent
    # without a callback that monitors something, the best round is that of the global accuracy
    assert result.best == result.best_by(GLOBAL)
    assert result.best.value == result.history[GLOBAL].max()
    assert result.best_by(LOCAL, mode="min").value == result.history[LOCAL].min()


def test_a_run_of_any_folder_can_be_read(result, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(result.folder, copy)
    monkeypatch.chdir(tmp_path)
    found, lost = FitResult.read("copy"), FitResult.read("copy")
    monkeypatch.chdir("/")  # what was read does not depend on where the program is
    pd.testing.assert_frame_equal(found.history, result.history)
    shutil.rmtree(copy)
    with pytest.raises(ConfigurationError, match=r"holds no metrics\.csv; was it removed, or is it elsewhere\?"):
        lost.history  # noqa: B018
    with pytest.raises(ConfigurationError, match=r"folder: '.*' is no run folder: it holds no metrics\.csv\."):
        FitResult.read(tmp_path)


def test_an_interrupted_run_has_a_result_of_its_finished_rounds(tmp_path):
    class Interrupts(Callback):
        def on_round_start(self, trainer, pl_module):
            if trainer.current_round == 3:
                raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, callbacks=Interrupts())
    assert not hasattr(trainer, "result")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(make_model(), BoringData(), FedAvg())
    interrupted = trainer.result
    assert list(interrupted.history.index) == [0, 1, 2]
    assert interrupted.checkpoint.is_file()
    resumed = fit(tmp_path, max_rounds=4, ckpt_path="last")
    assert resumed.folder == interrupted.folder
    assert list(resumed.history.index) == [0, 1, 2, 3, 4]
    assert list(interrupted.history.index) == [0, 1, 2]  # rounds of a resumed run belong to its own result


@pytest.mark.parametrize(("monitor", "mode"), [(LOSS, "max"), ("test_accuracy", "max")])
def test_the_best_round_is_that_of_the_callback_that_monitors_one(tmp_path, monitor, mode):
    callback = RoundCheckpoint(monitor=monitor, mode=mode)
    result = fit(tmp_path, callbacks=callback)
    best = result.best
    assert (best.round, best.mode) == (callback.best_round, mode)
    assert best.value == pytest.approx(callback.best)
    assert best.values == result.history.loc[best.round].dropna().to_dict()
    assert set(result.checkpoints) == {"best", "last"}


def test_validation_data_choose_the_best_round_where_there_are_any(tmp_path):
    class Validates(BoringModel):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    data = BoringData(batch_size=12, val_fraction=0.25, drop_last=True)
    result = fit(tmp_path, model=make_model(Validates), data=data)
    assert (result.best.metric, result.best.mode) == (VAL_LOSS, "min")
    assert result.best.value == result.history[VAL_LOSS].min()
    assert list(result.summary.index) == [GLOBAL, LOCAL, WORST]


def test_it_is_shown_as_a_table(result, monkeypatch):
    monkeypatch.chdir(result.folder.parents[2])
    head, columns, *rows, last = repr(result).splitlines()
    assert head.startswith("FedAvg: 3 rounds in ")
    assert head.endswith("recorded in runs/default/FedAvg-1")
    assert columns.split() == f"first: round 0 last: round 3 best: round {result.best.round}".split()
    assert [row.split()[0] for row in rows] == [GLOBAL, LOCAL, WORST]
    assert last == f"The best round is that with the largest {GLOBAL}."
    numbers = result.history.loc[[0, 3, result.best.round], GLOBAL]
    assert rows[0].split()[1:] == [f"{number:.4f}" for number in numbers]


def test_a_run_that_evaluates_nothing_shows_its_training_loss(tmp_path):
    result = fit(tmp_path, eval_every_n_rounds=0)
    assert result.best is None
    assert result.evaluation.empty
    assert list(result.summary.index) == [TRAIN_LOSS]
    assert repr(result).splitlines()[-1] == "No round was evaluated."
    assert [line.get_label() for line in result.plot().lines] == [TRAIN_LOSS]


def test_curves_are_drawn_of_the_key_metrics_and_of_any_other(tmp_path):
    result = fit(tmp_path, eval_every_n_rounds=2)
    axes = result.plot()
    assert [line.get_label() for line in axes.lines] == [GLOBAL, LOCAL, WORST]
    assert axes.lines[0].get_xdata().tolist() == [0, 2, 3]  # without gaps at rounds that were not evaluated
    assert axes.lines[0].get_ydata().tolist() == result.history[GLOBAL].dropna().tolist()
    assert result.plot(TRAIN_LOSS, ax=axes) is axes
    assert len(axes.lines) == 4
    with pytest.raises(ConfigurationError, match=f"The run has no metric '{GLOBAL}s'; did you mean '{GLOBAL}'"):
        result.plot(GLOBAL + "s")
