"""What the program prints of an exception in the code of a user: his lines, the place in the run, no other frames."""

import re
from pathlib import Path

import pytest
from helpers.programs import run_python

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
FIT = ("-m", "fedbc_lightning", "fit", "--config", "tiny.yaml", "--model.num_features", 4, "--model.num_classes", 3)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_users_lines_alone_and_where_it_was(project, devices):
    Path("mine.py").write_text(BOOM)
    done = run_python([*FIT, "--model", "mine.Boom", "--trainer.devices", devices], project)
    assert done.returncode == 1
    printed = [re.sub(r"^\[rank\d\]: ", "", line) for line in done.stderr.splitlines()]  # torch's own
    assert [line for line in printed if "mine.py:7 in training_step" in line], "the user's line"
    start = printed.index("KeyError: 'boom'")
    assert re.search(r"client \d+, round 2, batch 0: \(\d+, \d+\) float32, ", printed[start + 1])


def test_a_wrong_loss_is_one_line_with_the_place(project):
    Path("mine.py").write_text(BOOM)
    done = run_python([*FIT, "--model", "mine.Vector", "--trainer.devices", 2], project)
    assert done.returncode == 1
    # On a busy machine rank 0 may be seconds late; then rank 1 says it, and rank 0 that rank 1 failed.
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    said = next(line for line in errors if "see its own message" not in line)
    assert "mine.py, line 12) returned a loss of shape (5,)" in said
    assert ", round 1, batch 0: (" in said
