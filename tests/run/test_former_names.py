"""Runs of versions whose metrics and folders had other names: they resume, and their names are read."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers.boring import BoringData, make_model, make_trainer
from lightning.pytorch.callbacks import EarlyStopping

from fedbc_lightning import FedBC
from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.core import metric_names
from fedbc_lightning.core.metric_names import current_name, current_names
from fedbc_lightning.run.folder import last_checkpoint
from fedbc_lightning.run.run_record import read_table
from fedbc_lightning.state import checkpoint

OLD = {
    "train/loss": "train_loss", "accuracy/global": "global/test_accuracy", "loss/global": "global/test_loss",
    "accuracy/local": "local/test_accuracy", "accuracy/local_weighted": "local/test_accuracy_weighted",
    "loss/local": "local/test_loss", "loss/local_weighted": "local/test_loss_weighted",
    "accuracy/worst10": "fairness/accuracy_worst10", "num_clients/evaluated": "fairness/num_clients",
}  # fmt: skip


def fit(root, rounds, *callbacks):
    trainer = make_trainer(root, max_rounds=rounds, callbacks=list(callbacks))
    trainer.fit(make_model(), BoringData(), FedBC(dual_lr=0.01), ckpt_path="last")
    return trainer


def make_old(run: Path) -> Path:
    """Give a run the names that an older version wrote."""
    old = run.with_name("version_0")
    shutil.move(run, old)
    for name in ("metrics", "evaluation"):
        pd.read_csv(old / f"{name}.csv", dtype=str).rename(columns=OLD).to_csv(old / f"{name}.csv", index=False)
    path = old / "checkpoints" / "last.ckpt"
    saved = checkpoint.load(path)
    ours = saved[checkpoint.KEY]
    ours["callback_metrics"] = {OLD.get(name, name): value for name, value in ours["callback_metrics"].items()}
    saved["callbacks"] = {key.replace("loss/global", OLD["loss/global"]): of for key, of in saved["callbacks"].items()}
    torch.save(saved, path)
    return old


def test_a_run_of_an_older_version_goes_on_under_the_new_names(tmp_path):
    best = RoundCheckpoint("loss/global", "min")
    whole = fit(tmp_path / "whole", 3, best)
    run = make_old(Path(fit(tmp_path / "old", 2, RoundCheckpoint("loss/global", "min")).log_dir))
    assert "global/test_loss" in (run / "metrics.csv").read_text()
    again = RoundCheckpoint("loss/global", "min")
    resumed = fit(tmp_path / "old", 3, again)
    assert Path(resumed.log_dir) == run
    for name in ("metrics", "evaluation"):
        found, expected = (pd.read_csv(Path(t.log_dir, f"{name}.csv")) for t in (resumed, whole))
        names = [name for name in expected if not name.startswith("time/")]
        pd.testing.assert_frame_equal(found[names], expected[names])
        assert set(found) == set(expected)
    assert set(resumed.callback_metrics) == set(whole.callback_metrics)
    assert (again.best, again.best_round) == (best.best, best.best_round)


def test_tables_of_older_versions_are_read_under_the_new_names(tmp_path):
    run = Path(fit(tmp_path, 1).log_dir)
    expected = {name: read_table(run / f"{name}.csv") for name in ("metrics", "evaluation", "clients")}
    assert "train_loss" in expected["clients"]
    old = make_old(run)
    assert last_checkpoint(old.parent) == old / "checkpoints" / "last.ckpt"
    for name, table in expected.items():
        pd.testing.assert_frame_equal(read_table(old / f"{name}.csv"), table)


def test_an_old_name_that_is_monitored_is_read_as_the_new_one(tmp_path, caplog):
    metric_names._say.cache_clear()
    caplog.set_level("INFO")
    stop = EarlyStopping("global/test_loss", min_delta=10.0, patience=1)
    best = RoundCheckpoint("fairness/accuracy_worst10")
    trainer = fit(tmp_path, 4, stop, best)
    assert trainer.current_round == 1
    assert best.best is not None
    said = "monitor: 'global/test_loss' is read as 'loss/global', as this metric is called now."
    assert caplog.messages.count(said) == 1
    for name in ("global/test_loss", "fairness/accuracy_worst10"):
        assert (
            name not in checkpoint.load(f"{trainer.log_dir}/checkpoints/last.ckpt")[checkpoint.KEY]["callback_metrics"]
        )


@pytest.mark.parametrize("old", ["global/test_a/b", "local/val_f1", "fairness/my_loss_std", "num_absent", "server_lr"])
def test_todays_names_stay_as_they_are(old):
    new = current_name(old)
    assert new != old
    assert current_name(new) == new


def test_a_column_that_a_user_logs_beside_todays_names_stays():
    names = ["round", "train/loss", "train_loss", "server_lr"]
    assert list(current_names(names).values()) == names
