"""How ``fedbc-cli`` ends when nobody reads what it prints, and when another process of its group is lost."""

import subprocess
import sys

import pytest
from helpers.programs import forked, program_environment, run_fresh, wait_until


@pytest.mark.skipif(sys.platform == "win32", reason="its pipes fail otherwise")
def test_who_reads_no_further_sees_no_traceback(tmp_path):
    """As after ``fedbc-cli --help | head -1``, which closes the pipe before all is written."""
    words = [sys.executable, "-u", "-m", "fedbc_lightning", "--help"]
    given = {"cwd": tmp_path, "env": program_environment(), "text": True}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given) as program:
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 141


def test_a_broken_pipe_of_something_else_is_told(tmp_path):
    fail = "def fail():\n    raise BrokenPipeError(32, 'of a service')\n\n\nmain.main = fail\nmain.program()\n"
    (tmp_path / "failing.py").write_text(f"from fedbc_lightning.commands import main\n\n\n{fail}")
    done = run_fresh(["failing.py"], tmp_path)
    assert done.returncode == 1
    assert "of a service" in done.stderr


GROUP = """\
import os
import time

import torch
from torch import distributed

from fedbc_lightning.commands import main

rank = 0 if os.fork() else 1
distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("met"), rank=rank, world_size=2)
if rank:
    time.sleep(600)
work = distributed.all_reduce(torch.zeros(1), async_op=True)
main.main = lambda: 7
main.program()
"""


@pytest.mark.distributed
def test_a_process_does_not_wait_for_another_that_never_answers(tmp_path):
    """The other takes no part in what this one began, and to leave their group in good order is to wait for it."""
    (tmp_path / "group.py").write_text(GROUP)
    with forked(["group.py"], tmp_path) as program:
        wait_until(lambda: program.poll() is not None, seconds=60)
        assert program.poll() == 7, program.printed
