"""What is wrong with a run's disk is said in one line, and the run goes on from its last checkpoint."""

import errno
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from helpers.boring import BoringData, make_model, make_trainer, read_csv
from helpers.refusals import refused
from lightning.pytorch import Callback

from fedbc_lightning import FedAvg
from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.core import files
from fedbc_lightning.core.files import told


class Breaks(Callback):
    """Does something to the run folder before round 2 is recorded."""

    def __init__(self, act):
        self.act = act

    def on_round_start(self, trainer, pl_module):
        if trainer.current_round == 2:
            self.act(Path(trainer.log_dir))


def full(name):
    def descriptor(path, flags, opened=files.descriptor):
        is_full = path.name.startswith(f".{name}") and not flags & os.O_EXCL
        return os.open("/dev/full", flags) if is_full else opened(path, flags)

    return lambda run: mock.patch.object(files, "descriptor", descriptor).start()


def fit(root, *callbacks, **options):
    trainer = make_trainer(root, callbacks=list(callbacks), **{"checkpoint_every_n_rounds": 1, **options})
    trainer.fit(make_model(), BoringData(), FedAvg(), ckpt_path="last")
    return trainer


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (full("best.ckpt"), r"-1' cannot be written \(No space left on device; .* are free .*\)\. Go on by the same"),
        (lambda run: (run / "metrics.csv").rename(run / "mine.csv"), r"metrics\.csv' cannot be written \(No such"),
        (shutil.rmtree, r"FedAvg-1\S*' cannot be written \(No such .* There is no checkpoint to go"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, act, message, caplog):
    with refused(message):
        fit(tmp_path, Breaks(act), RoundCheckpoint("train/loss", "min"))
    run = tmp_path / "default" / "FedAvg-1"
    mock.patch.stopall()
    for path in run.glob("mine.csv"):
        path.rename(run / "metrics.csv")
    trainer = fit(tmp_path, RoundCheckpoint("train/loss", "min"))
    assert trainer.log_dir == str(run)
    assert [row["round"] for row in read_csv(run / "metrics.csv")] == ["0", "1", "2", "3"]


def test_errors_of_other_files_pass(tmp_path):
    def broken(*arguments):
        with told(tmp_path):
            raise OSError(*arguments)

    with pytest.raises(OSError, match="elsewhere"):
        broken(errno.EACCES, "denied", str(tmp_path.parent / "elsewhere"))
    with pytest.raises(ConnectionRefusedError):
        broken(errno.ECONNREFUSED, "a logger's server")
