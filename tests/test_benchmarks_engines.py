"""benchmarks/engines.py: a line for each way to train, with its ratio to the hand-written loop."""

import re

import numpy as np
import pytest
from helpers.scripts import imported_script


@pytest.fixture
def script(monkeypatch):
    with imported_script("benchmarks/engines.py") as module:
        tiny = module.Workload(np.array([30, 20, 45]), (60,), module._logistic, 2, 2, rounds=2, warm_up=1)
        monkeypatch.setattr(module, "WORKLOADS", {"W1": tiny})
        yield module


@pytest.mark.parametrize("words", [["W1"], []])
def test_the_table(script, monkeypatch, capsys, words):
    monkeypatch.setattr("sys.argv", ["engines.py", *words, "--pairs", "2"])
    script.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("W1 ")]
    ratio = r"([\d.]+) \([\d.]+ to [\d.]+\)"
    found = [re.fullmatch(rf"W1 (\S+) +\d+ steps/s +/ floor {ratio}(?:   / (\S+) {ratio})?", line) for line in lines]
    ways = [(match[1], match[3]) for match in found]
    assert ways[:-1] == [
        ("floor", None), ("torch.optim", None), ("FedAvg", None), ("FedBC", "FedAvg"),
        ("FedAvg-vectorized", None), ("FedBC-vectorized", "FedAvg-vectorized"),
    ]  # fmt: skip
    assert ways[-1][0] == "FedAvg-auto"
    assert ways[-1][1] in ("FedAvg", "FedAvg-vectorized")
    assert found[0][2] == "1.00"


def test_the_profile(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["engines.py", "--profile"])
    script.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(":")[0] for line in lines if "profiler" in line] == ["W1 sequential", "W1 vectorized"]
    shares = [float(line.split("%")[0]) for line in lines[1:9]]
    assert shares == sorted(shares, reverse=True)
    assert 20 < sum(shares) <= 100.5
    assert any("engines/" in line for line in lines)


def test_an_unknown_workload_is_named(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["engines.py", "W7"])
    with pytest.raises(SystemExit):
        script.main()
    assert "unknown: W7; there are W1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "rank"), [(4, None), (5, 1), (7, 1), (8, 2), (9, 2), (20, 6)]
)  # from the quantiles of fair coins
def test_the_interval_of_a_median(script, number, rank):
    values = [float(value) for value in range(number, 0, -1)]
    assert script.interval(values) == (None if rank is None else (rank, number + 1 - rank))
    assert ("90 %" in script.describe(values, [1.0] * number)) == (rank is not None)
