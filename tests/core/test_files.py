"""CSV files, run folders, checkpoint files: what survives a kill."""

import os

import pytest
import torch

from fedbc_lightning import ConfigurationError
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.tables import CSVFile
from fedbc_lightning.state import checkpoint


def make_file(tmp_path):
    return CSVFile(tmp_path / "m.csv", first=("round", "loss"), has_metrics=True)


def test_new_columns_extend_the_header_in_a_fixed_order(tmp_path):
    table = make_file(tmp_path)
    table.append([{"round": 0, "dual/x": 1.5}])
    table.append([{"round": 1, "loss": 2.0, "dual/x": 1.0, "a/local": 0.1}])
    assert table.path.read_text() == "round,loss,a/local,dual/x\n0,,,1.5\n1,2.0,0.1,1.0\n"


@pytest.mark.parametrize("tail", ["", "12,0.5", "12,0.5,0.1\n13,1", "12,0.5,0.1\n13,0.4,0.2\n", "1"])
def test_recovery_drops_later_and_cut_off_rows(tmp_path, tail):
    """What is left of round 12 may read as round 1."""
    table = make_file(tmp_path)
    table.append([{"round": r, "loss": 0.25, "a/y": 0.125} for r in range(12)])
    expected = table.path.read_text()
    with table.path.open("a") as file:
        file.write(tail)
    again = make_file(tmp_path)
    again.recover(11)
    assert again.path.read_text() == expected
    again.append([{"round": 12, "loss": 0.75, "a/y": 0.5}])
    assert again.path.read_text() == expected + "12,0.75,0.5\n"
    again.recover(-1)
    assert again.path.read_text() == expected.splitlines()[0] + "\n"


def test_run_folders_are_claimed_one_by_one(tmp_path):
    locks = [RunLock() for _ in range(4)]
    claimed = [run_folder.claim(tmp_path / "x", "FedBC-3", lock).name for lock in locks[:3]]
    assert claimed == ["FedBC-3", "FedBC-3-1", "FedBC-3-2"]
    (tmp_path / "x" / "FedBC-3-3" / "by_somebody").mkdir(parents=True)
    assert run_folder.claim(tmp_path / "x", "FedBC-3", locks[3]).name == "FedBC-3-4"
    for lock in locks:
        lock.close()


def test_last_checkpoint_is_the_one_written_last(tmp_path):
    assert run_folder.last_checkpoint(tmp_path) is None
    for name, age in (("version_0", 100), ("FedBC-0", 50), ("FedAvg-0-1", 75)):
        path = tmp_path / name / run_folder.LAST
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    assert run_folder.last_checkpoint(tmp_path) == tmp_path / "FedBC-0" / run_folder.LAST


def test_checkpoint_files_that_cannot_be_used_or_written(tmp_path):
    path, content = tmp_path / "last.ckpt", {checkpoint.KEY: {"format": checkpoint.FORMAT, "z": torch.ones(1000)}}
    checkpoint.save_atomically(content, path)
    with pytest.raises(ConfigurationError, match=r"is a builtins\.function; .* stays as it was"):
        checkpoint.save_atomically({checkpoint.KEY: lambda: None}, path)
    assert checkpoint.load(path)[checkpoint.KEY].keys() == content[checkpoint.KEY].keys()
    checkpoint.save_atomically({checkpoint.KEY: {"format": 0}}, path)
    with pytest.raises(ConfigurationError, match=r"last\.ckpt' has format 0, this version reads format 1"):
        checkpoint.load(path)
    assert not list(tmp_path.glob(".*.tmp"))
