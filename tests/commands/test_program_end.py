"""How ``fedbc-cli`` ends when nobody reads what it prints."""

import subprocess
import sys

import pytest
from helpers.programs import program_environment, run_fresh


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
