"""benchmarks/startup.py: a line for each command, with its ratio."""

import importlib.util
import re
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "startup.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("benchmarks_startup", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "LIGHTNING", ["-c", "pass"])  # takes seconds
    script.main(["help", "import", "--repeats", "2"])
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(\S+) +[\d.]+ s \(.* to .*\)   / lightning (.*) \(.* to .*\)", line) for line in lines]
    assert [match[1] for match in found] == ["lightning", "help", "import"]
    assert found[0][2] == "1.00"


def test_a_command_of_another_name(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["helped"])
    assert "unknown: helped; there are import, help, fit-help, fit" in capsys.readouterr().err
