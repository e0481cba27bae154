"""``fedbc-cli`` ends at once when it is done, and what others rely on at a process' end has happened by then."""

import gzip
import subprocess
import sys

import pytest
from helpers.programs import forked, program_environment, run_fresh, wait_until

LEAVING = """\
import atexit
import ctypes
import gzip
import multiprocessing
import os
import threading
import time

from fedbc_lightning.commands.leaving import is_outermost, leave


class Last:
    def __init__(self, words):
        self.words = words

    def __del__(self):
        print(self.words, flush=True)


def program():
    return is_outermost()


if __name__ == "__main__":
    assert program()
    held, circle = Last("taken apart"), Last("deleted")
    circle.circle = circle
    del circle
    text, packed = open("text.txt", "w"), gzip.open("packed.gz", "wb")
    text.write("text")
    packed.write(b"packed")
    silent = open(os.pipe()[0])
    threading.Thread(target=silent.read, daemon=True).start()
    multiprocessing.get_context("fork").Process(target=time.sleep, args=[600], daemon=True).start()
    threading.Thread(target=lambda: [time.sleep(0.1), print("joined", flush=True)]).start()
    atexit.register(print, "left")
    ctypes.CDLL(None).printf(b"of C\\n")
    leave(3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_what_a_process_does_at_its_end_is_done(tmp_path):
    """Only objects that are held to the end are not taken apart, for that took two seconds."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    done = run_fresh(["leaving.py"], tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    assert sorted(done.stdout.splitlines()) == ["deleted", "joined", "left", "of C"]
    assert (tmp_path / "text.txt").read_text() == "text"
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"packed"


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


PROFILER = """\
import runpy
import sys

sys.argv = ["fedbc-cli", *sys.argv[1:]]
try:
    runpy.run_module("fedbc_lightning", run_name="__main__")
except SystemExit as stop:
    print("goes on after", stop.code)
"""


def test_who_runs_the_program_inside_another_goes_on_after_it(tmp_path):
    (tmp_path / "profiler.py").write_text(PROFILER)
    assert run_fresh(["profiler.py", "fti"], tmp_path).stdout.endswith("goes on after 2\n")
    prompt = [sys.executable, "-i", "-m", "fedbc_lightning", "fti"]
    given = {"input": "print('goes', 'on')\n", "cwd": tmp_path, "env": program_environment()}
    assert subprocess.run(prompt, **given, capture_output=True, text=True).stdout.endswith("goes on\n")


GROUP = """\
import atexit
import os
import time

import torch
from torch import distributed

from fedbc_lightning.commands.leaving import leave
from fedbc_lightning.distributed.fabric import leave_process_group

rank = 0 if os.fork() else 1
distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("met"), rank=rank, world_size=2)
if rank:
    time.sleep(600)
atexit.register(leave_process_group)
work = distributed.all_reduce(torch.zeros(1), async_op=True)
leave(7)
"""


@pytest.mark.distributed
def test_a_process_does_not_wait_for_another_that_never_answers(tmp_path):
    """The other takes no part in what this one began, and to leave their group in good order is to wait for it."""
    (tmp_path / "group.py").write_text(GROUP)
    with forked(["group.py"], tmp_path) as program:
        wait_until(lambda: program.poll() is not None, seconds=60)
        assert program.poll() == 7, program.printed
