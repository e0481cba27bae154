"""benchmarks/together.py: a line for each way, with its ratio."""

import io
import re
from contextlib import redirect_stdout

import pytest
from helpers.command_line import run_cli
from helpers.scripts import imported_script

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def script():
    with imported_script("benchmarks/together.py") as module:
        yield module


def test_the_table(script, monkeypatch, capsys):
    def run_here(command, cwd, **options):
        assert command[1:3] == ["-m", "fedbc_lightning"]
        with monkeypatch.context() as place, redirect_stdout(io.StringIO()):
            place.chdir(cwd)
            assert run_cli(*command[3:]) == 0

    monkeypatch.setattr(script.subprocess, "run", run_here)
    monkeypatch.setattr(script, "ALGORITHMS", {"FedAvg": {}, "FedProx": {"mu": 0.1}})  # each way takes seconds
    monkeypatch.setattr(script, "WAYS", {"vectorized": ("vectorized", 1), "together": ("vectorized", 64)})
    script.main(["digits", "--runs", "2", "--rounds", "1", "--repeats", "1"])
    lines = capsys.readouterr().out.splitlines()
    found = [
        re.fullmatch(r"digits +(\S+) +[\d.]+ s \(.* to .*\)   / together (.*) \(.* to .*\)", line) for line in lines
    ]
    assert [match[1] for match in found] == ["vectorized", "together"]
    assert found[1][2] == "1.00"


def test_a_workload_of_another_name(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["W9"])
    assert "unknown: W9; there are synthetic-E5, synthetic-E25, digits" in capsys.readouterr().err
