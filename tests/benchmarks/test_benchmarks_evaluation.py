"""benchmarks/evaluation.py: a line for each case, with its ratio."""

import re

import pytest
from helpers.scripts import imported_script


@pytest.fixture
def script():
    with imported_script("benchmarks/evaluation.py") as module:
        yield module


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
def test_the_table(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["evaluation.py", "--pairs", "1", "--clients", "20", "--rounds", "3"])
    monkeypatch.setattr(script, "CASES", {name: script.CASES[name] for name in ("logistic", "MLP")})
    script.main()
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(\S+) +([\d.]+) +([\d.]+) +([\d.]+)   ([\d.]+) \(\5 to \5\)", line) for line in lines[-2:]]
    assert [match[1] for match in found] == ["logistic", "MLP"]
    assert all(float(number) > 0 for match in found for number in match.groups()[1:])


def test_sizes(script):
    assert script.sizes_of(script.CASES["logistic"], 8).tolist() == [5, 6, 7, 8, 9, 10, 11, 5]
    sizes = script.sizes_of(script.CASES["logistic, log-normal sizes"], 1000)
    assert sizes.min() == 1
    assert 7 <= float(script.np.median(sizes)) <= 9
