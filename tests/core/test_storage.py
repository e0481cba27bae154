"""What is wrong with a run's disk is said in one line, and the run goes on from its last checkpoint."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from helpers.boring import BoringData, make_model, make_trainer, read_csv
from lightning.pytorch import Callback

from fedbc_lightning import ConfigurationError, FedAvg
from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.core import storage


class Breaks(Callback):
    """Does something to the run folder before round 2 is recorded."""

    def __init__(self, act):
        self.act = act

    def on_round_start(self, trainer, pl_module):
        if trainer.current_round == 2:
            self.act(Path(trainer.log_dir))


def full(name):
    return lambda run: (run / "checkpoints" / f"{name}.tmp").symlink_to("/dev/full")


def fit(root, *callbacks, **options):
    trainer = make_trainer(root, callbacks=list(callbacks), **{"checkpoint_every_n_rounds": 1, **options})
    trainer.fit(make_model(), BoringData(), FedAvg(), ckpt_path="last")
    return trainer


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            full("last.ckpt"),
            r"the disk of '\S*-1' is full \(No space left on device; .* are free, last\.ckpt needs",
        ),
        (
            full("best.ckpt"),
            r"the disk of '\S*-1' is full .* Make room, or raise your quota\. Go on by the same",
        ),
        (lambda run: (run / "checkpoints" / "last.ckpt.tmp").mkdir(), r"last\.ckpt\.tmp' cannot be written \(Is a dir"),
        (
            lambda run: (run / "metrics.csv").rename(run / "mine.csv"),
            r"metrics\.csv' is no longer there \(No such",
        ),
        (shutil.rmtree, r"the run folder '\S*FedAvg-1' is no longer there \(No such .* There is no checkpoint to go"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, act, message, caplog):
    with pytest.raises(ConfigurationError, match=message) as caught:
        fit(tmp_path, Breaks(act), RoundCheckpoint("train/loss", "min"))
    assert "\n" not in str(caught.value)
    run = tmp_path / "default" / "FedAvg-1"
    for path in run.glob("checkpoints/last.ckpt.tmp"):
        path.rmdir()
    for path in run.glob("mine.csv"):
        path.rename(run / "metrics.csv")
    trainer = fit(tmp_path, RoundCheckpoint("train/loss", "min"))
    assert trainer.log_dir == str(run)
    assert [row["round"] for row in read_csv(run / "metrics.csv")] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("number", "message"), [(errno.EACCES, "another user's"), (errno.EIO, "look after its disk")])
def test_errors_of_other_files_pass(tmp_path, number, message):
    for folder, kind in ((tmp_path, ConfigurationError), (tmp_path / "elsewhere", OSError)):
        folder.mkdir(exist_ok=True)
        with pytest.raises(kind, match=message if folder == tmp_path else "elsewhere|file"), storage.told(folder):
            raise OSError(number, os.strerror(number), str(tmp_path / "file"))
    table = str(tmp_path / "metrics.csv")  # the name that the user knows, where one file was to replace another
    with pytest.raises(ConfigurationError, match=r"metrics\.csv' cannot be written"), storage.told(tmp_path):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), f"{table}.tmp", None, table)
    with pytest.raises(ConnectionRefusedError), storage.told(tmp_path):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "a logger's server")
