"""One process writes to a run folder; what was started and never recorded is taken again."""

import os
import shutil
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from helpers.boring import BoringData, BoringModel, make_model, make_trainer, read_csv
from helpers.command_line import run_cli
from lightning.pytorch import Callback

from fedbc_lightning import ConfigurationError, FedAvg
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run import lock as run_lock
from fedbc_lightning.run.lock import RunLock

HOST = socket.gethostname()


@contextmanager
def other_process(folder, host=HOST):
    """A process that has the lock, maybe on another machine, and a worker of its own that outlives it."""
    is_ready, ready = os.pipe()
    child = os.fork()
    if not child:
        with mock.patch("socket.gethostname", return_value=host):
            lock = RunLock()
            lock.take(folder)
        worker = os.fork()
        if worker:
            os.write(ready, str(worker).encode())
        signal.pause()
    worker = int(os.read(is_ready, 100))
    try:
        yield child, worker
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(is_ready)
        os.close(ready)


def test_a_folder_belongs_to_one_process_until_that_dies(tmp_path):
    with other_process(tmp_path) as (pid, worker):
        shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}_copy"))  # opens and closes the lock file
        with pytest.raises(ConfigurationError, match=rf"'{tmp_path}' is being written by process {pid} on "):
            RunLock().take(tmp_path)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.kill(worker, 0)  # it lives
        with RunLock() as lock:
            lock.take(tmp_path)
            shutil.copytree(tmp_path, tmp_path / "copy")
            with RunLock() as other:
                other.take(tmp_path / "copy")


def test_what_another_machine_has_is_free_when_it_is_not_touched(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "SECONDS_BETWEEN_TOUCHES", 0.1)
    monkeypatch.setattr(run_lock, "SECONDS_TO_LIVE", 1.0)
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 3600)  # the file system's clock alone counts
    with other_process(tmp_path, "node7") as (pid, _):
        assert RunLock().owner_after_trying(tmp_path) == f"process {pid} on node7"
        with pytest.raises(ConfigurationError, match=f"is being written by process {pid} on node7"):
            RunLock().take(tmp_path)  # having waited for a touch
        os.kill(pid, signal.SIGSTOP)
        with RunLock() as lock:
            lock.take(tmp_path)
        assert f"has the lock of process {pid} on node7; waiting" in caplog.text
        os.kill(pid, signal.SIGKILL)


class Sleeps(Callback):
    """Its machine does not touch the lock file for so long that another one takes the run over."""

    def on_round_end(self, trainer, pl_module):
        if trainer.current_round == 2:
            folder = Path(trainer.log_dir)
            os.utime(folder / ".lock", (0, 0))
            with RunLock() as other:
                other.take(folder)
                self.before = contents(folder)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_who_has_lost_a_run_writes_nothing_more(tmp_path):
    sleeper = Sleeps()
    with pytest.raises(ConfigurationError, match=r"FedAvg-1' was taken over by .* touch its \.lock for 300 s; it ends"):
        fit(tmp_path, [sleeper], checkpoint_every_n_rounds=1, logger=True)
    assert contents(tmp_path) == sleeper.before


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
    (tmp_path / "other" / "FedAvg-1").mkdir(parents=True)
    (tmp_path / "other" / "FedAvg-1" / "notes.txt").touch()  # what people put into a folder is never removed
    with RunLock() as lock:
        assert run_folder.claim(tmp_path / "other", "FedAvg-1", lock).name == "FedAvg-1-1"


@pytest.mark.filterwarnings("ignore:seed was")
def test_last_needs_no_config_where_the_run_can_be_found(project, capsys):
    assert run_cli("fit", "--config", "tiny.yaml", "--trainer.default_root_dir", "here") == 0
    where = ["--trainer.default_root_dir", "here", "--trainer.name", "tiny", "--ckpt_path", "last"]
    assert run_cli("fit", "--trainer.max_rounds", 3, *where) == 0
    assert len(read_csv("here/tiny/FedAvg-0/metrics.csv")) == 4
    named = ["--trainer.max_rounds", 4, "--seed_everything", 3, "--ckpt_path", "here/tiny/FedAvg-0"]
    assert run_cli("fit", *named) == 1
    assert "was trained with 0, 3 is given now" in capsys.readouterr().err
    assert (
        run_cli("fit", "--trainer.max_rounds", 4, "--seed_everything", 3, "--other_seed", "true", *where) == 0
    )  # of any seed
    assert "other_seed: false" in Path("here/tiny/FedAvg-0/config.yaml").read_text()
    assert run_cli("test", "--ckpt_path", "here/tiny/FedAvg-0") == 0
