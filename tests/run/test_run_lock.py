"""One process writes to a run folder; what was started and never recorded is taken again."""

import os
import shutil
from pathlib import Path

import pytest
from helpers.boring import BoringData, BoringModel, make_model, make_trainer, read_csv
from helpers.command_line import run_cli

from fedbc_lightning import FedAvg
from fedbc_lightning.run.lock import RunLock


def test_a_copy_of_a_locked_folder_is_free_and_to_copy_it_frees_nothing(tmp_path):
    with RunLock() as lock:
        lock.take(tmp_path)
        shutil.copytree(tmp_path, tmp_path / "copy")  # opens and closes the lock file
        with RunLock() as other:
            other.take(tmp_path / "copy")
        lock.check()


def fit(root, callbacks=None, model=None, **options):
    trainer = make_trainer(root, callbacks=callbacks, **options)
    trainer.fit(make_model() if model is None else model, BoringData(), FedAvg(), ckpt_path="last")
    return trainer


class Stops(BoringModel):
    def test_step(self, batch, batch_idx):
        raise RuntimeError("stop here")


def test_a_run_that_ended_before_its_first_checkpoint_leaves_no_empty_version(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stop here"):
            fit(tmp_path, model=make_model(Stops), logger=True)
    killed = tmp_path / "default" / "FedAvg-1"
    (killed / "metrics.csv").write_text("round,train/loss\n0,1.0\n")  # by a kill just before last.ckpt
    (killed / "checkpoints").mkdir()
    (killed / "checkpoints" / ".last.ckpt.0123456789abcdef.tmp").touch()
    trainer = fit(tmp_path, logger=True)
    assert os.listdir(tmp_path / "default") == ["FedAvg-1"]
    assert len(read_csv(f"{trainer.log_dir}/metrics.csv")) == 4
    assert len(list(killed.glob("events*"))) == 1


@pytest.mark.filterwarnings("ignore:seed was")
def test_last_needs_no_config_where_the_run_can_be_found(project, capsys):
    assert run_cli("fit", "--config", "tiny.yaml", "--trainer.default_root_dir", "here") == 0
    where = ["--trainer.default_root_dir", "here", "--trainer.name", "tiny", "--ckpt_path", "last"]
    assert run_cli("fit", "--trainer.max_rounds", 3, *where) == 0
    assert len(read_csv("here/tiny/FedAvg-0/metrics.csv")) == 4
    named = ["--trainer.max_rounds", 4, "--seed_everything", 3, "--ckpt_path", "here/tiny/FedAvg-0"]
    assert run_cli("fit", *named) == 1
    assert "was trained with 0, 3 is given now" in capsys.readouterr().err
    of_any_seed = ["--trainer.max_rounds", 4, "--seed_everything", 3, "--other_seed", "true", *where]
    assert run_cli("fit", *of_any_seed) == 0
    assert "other_seed: false" in Path("here/tiny/FedAvg-0/config.yaml").read_text()
    assert run_cli("test", "--ckpt_path", "here/tiny/FedAvg-0") == 0
