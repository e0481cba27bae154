"""However processes are started, `fit` returns, and with the same numbers as one process."""

from __future__ import annotations

import json

import pytest
from helpers.launched import summary, train
from helpers.notebooks import execute_code
from helpers.programs import TESTS, run_python

pytestmark = pytest.mark.distributed

PROGRAM = """\
import json
import sys
from pathlib import Path

sys.path.insert(0, {tests!r})

import torch
from helpers.launched import summary, train

if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.ones(2**20).sin()  # on two threads, of which a fork has one
    print("the end:", json.dumps(summary(*train(Path(), devices=2, strategy={strategy!r}))))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one process comes to."""
    return summary(*train(tmp_path_factory.mktemp("one")))


def printed_by(output):
    return json.loads(
        next(line for line in output.splitlines() if line.startswith("the end:")).removeprefix("the end:")
    )


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_a_megabyte_comes_back_from_processes_that_were_started(tmp_path, strategy, expected):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(tests=str(TESTS), strategy=strategy))
    done = run_python([script], tmp_path)
    assert done.returncode == 0, done.stderr
    assert printed_by(done.stdout) == expected


def test_two_processes_return_to_a_notebook(tmp_path, monkeypatch, expected):
    """In a real kernel, where `strategy: auto` forks."""
    (cell,) = execute_code([PROGRAM.format(tests=str(TESTS), strategy="auto")], tmp_path, monkeypatch)
    (output,) = (out.text for out in cell.outputs if out.get("name") == "stdout")
    assert printed_by(output) == expected
