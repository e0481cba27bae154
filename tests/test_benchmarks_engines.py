"""benchmarks/engines.py: a line for each way to train, with its ratio to the hand-written loop."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "engines.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("benchmarks_engines", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_table(script, monkeypatch, capsys):
    tiny = script.Workload(np.array([30, 20, 45]), (60,), script._logistic, 2, 2, 2)
    monkeypatch.setattr(script, "WORKLOADS", {"W1": tiny})
    monkeypatch.setattr("sys.argv", ["engines.py", "W1", "--pairs", "2"])
    script.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("W1 ")]
    found = [re.fullmatch(r"W1 (\S+) +\d+ steps/s +/ floor ([\d.]+) \(.* to .*\)", line) for line in lines]
    assert [match[1] for match in found] == ["floor", "torch.optim", "FedAvg", "vectorized", "FedBC"]
    assert found[0][2] == "1.00"
