"""What the program prints of an exception in the code of a user: his lines, the place in the run, no other frames."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BOOM = """\
from fedbc_lightning.models import LogisticRegression


class Boom(LogisticRegression):
    def training_step(self, batch, batch_idx):
        if self.trainer.current_round == 2:
            raise KeyError("boom")
        return super().training_step(batch, batch_idx)


class Vector(LogisticRegression):
    def training_step(self, batch, batch_idx):
        return self(batch[0]).sum(1)
"""
SCRIPT = """\
import sys

import mine
from fedbc_lightning import FedAvg, FederatedTrainer
from fedbc_lightning.datamodules import DigitsDataModule

module = getattr(mine, sys.argv[1])(num_features=64, num_classes=10)
trainer = FederatedTrainer(max_rounds=2, clients_per_round=2, logger=False, enable_checkpointing=False)
trainer.fit(module, DigitsDataModule(), FedAvg())
"""


OPTIONS = ("--model.num_features", "4", "--model.num_classes", "3", "--model")


def fit(*words):
    command = [sys.executable, "-m", "fedbc_lightning", "fit", "--config", "tiny.yaml", *words]
    return run(command)


def run(command):
    environment = {**os.environ, "PYTHONPATH": ".", "FEDBC_TRACEBACK": "short"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_users_lines_alone_and_where_it_was(project, devices):
    Path("mine.py").write_text(BOOM)
    done = fit(*OPTIONS, "mine.Boom", "--trainer.devices", str(devices))
    assert done.returncode == 1
    rank = "[rank 0] " if devices == 2 else ""
    printed = [line.removeprefix(rank) for line in done.stderr.splitlines()]
    start = printed.index("Traceback (most recent call last):")
    frames = [line for line in printed[start:] if line.startswith("  File ")]
    assert [line.rpartition("/")[2] for line in frames] == ['mine.py", line 7, in training_step']
    said = printed[printed.index("KeyError: 'boom'") :]
    assert said[1].startswith("client ")
    assert said[1].endswith(", round 2, batch 0")
    assert said[2].endswith("torch, Lightning and Python are left out; FEDBC_TRACEBACK=full shows them)")


def test_a_wrong_loss_is_one_line_with_the_place(project):
    Path("mine.py").write_text(BOOM)
    done = fit(*OPTIONS, "mine.Vector", "--trainer.devices", "2")
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert "mine.py, line 12) returned a loss of shape (5,)" in said
    assert said.endswith(", round 1, batch 0)")


@pytest.mark.parametrize("module", ["Boom", "Vector"])
def test_a_script_shows_its_own_lines_and_one_of_the_package(project, module):
    Path("mine.py").write_text(BOOM)
    Path("own.py").write_text(SCRIPT)
    done = run([sys.executable, "own.py", module])
    assert done.returncode == 1
    start = done.stderr.index("Traceback (most recent call last):")
    frames = [Path(file).name for file in re.findall(r'  File "(.+?)"', done.stderr[start:])]
    assert frames == ["own.py", "tracebacks.py", *(["mine.py"] if module == "Boom" else [])]
    assert "FEDBC_TRACEBACK=full" in done.stderr
    *_, said, place = done.stderr.splitlines()
    assert place.startswith("client ")
    if module == "Boom":
        assert (said, place.partition(", ")[2]) == ("KeyError: 'boom'", "round 2, batch 0")
    else:
        assert "mine.py, line 12) returned a loss of shape (32,)" in said
