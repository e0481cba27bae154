"""benchmarks/processes.py: a line with the ratio of two processes to one, and what the clients allow."""

import re

import pytest
from helpers.scripts import imported_script

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def script():
    with imported_script("benchmarks/processes.py") as module:
        yield module


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
@pytest.mark.distributed
def test_the_table(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["processes.py", "W1", "--pairs", "1"])
    script.main()
    out = capsys.readouterr().out
    found = re.fullmatch(r"W1 steps/s: one process \d+, two \d+; ratio [\d.]+ \(.* to .*\), at best ([\d.]+)\n", out)
    assert 1.8 <= float(found[1]) <= 1.9  # one client of W1 has half of all steps of some rounds


@pytest.mark.parametrize(
    ("rounds", "expected"), [([[3, 1, 1]], 5 / 3), ([[2, 2], [4]], 8 / 6), ([[3, 3, 2, 2, 2]], 2.0), ([[5]], 1.0)]
)
def test_the_best_ratio_shares_whole_clients(script, rounds, expected):
    assert script.best_ratio(rounds) == pytest.approx(expected)
