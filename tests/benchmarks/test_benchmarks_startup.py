"""benchmarks/startup.py: a line for each command, with its ratio."""

import re

import pytest
from helpers.scripts import imported_script


@pytest.fixture
def script():
    with imported_script("benchmarks/startup.py") as module:
        yield module


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
