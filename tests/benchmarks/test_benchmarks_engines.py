"""benchmarks/engines.py: a line for each way to train, with its ratio to the hand-written loop."""

import importlib
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch
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


@pytest.mark.skipif(find_spec("pfl") is None, reason="pfl is not installed: it is only for the benchmark")
def test_pfl_research_takes_as_many_steps(script, monkeypatch):
    peers = importlib.import_module("peers")
    work, taken, cross_entropy = script.WORKLOADS["W1"], [], torch.nn.functional.cross_entropy
    monkeypatch.setattr(peers.functional, "cross_entropy", lambda *args: taken.append(1) or cross_entropy(*args))
    assert peers.pfl_research(work, script.Clients(work.sizes, work.shape)) > 0
    sampled = [script.UniformSampler()(3, 2, seed=0, round=t) for t in (1, 2, 3)]
    by_hand = sum(2 * -(-int(work.sizes[client]) // 20) for ids in sampled for client in ids)
    assert len(taken) == by_hand + 2 * 2  # and an evaluation before and after training in the first round
    assert peers.num_steps(work, work.sizes) == 2 * (2 + 1 + 3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("pfl-research", "pfl"), ("Flower", "flwr")])
def test_a_peer_has_a_speed(script, name, package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: it is only for the benchmark")
    assert script.speed_of_peer(name, "W1") > 0


@pytest.mark.usefixtures("forks")
def test_a_peer_that_fails_is_named(script):
    with pytest.raises(RuntimeError, match=r"(?s)Flower failed on W9:.*invalid choice: 'W9'"):
        script.speed_of_peer("Flower", "W9")


def test_no_peer_is_there(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "find_spec", lambda package: None)
    for words, said in ((["--peers"], "none is installed; pip install"), (["--peers", "--cpu-time"], "by seconds")):
        monkeypatch.setattr("sys.argv", ["engines.py", *words])
        with pytest.raises(SystemExit):
            script.main()
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "rank"), [(4, None), (5, 1), (7, 1), (8, 2), (9, 2), (20, 6)]
)  # from the quantiles of fair coins
def test_the_interval_of_a_median(script, number, rank):
    values = [float(value) for value in range(number, 0, -1)]
    assert script.interval(values) == (None if rank is None else (rank, number + 1 - rank))
    assert ("90 %" in script.describe(values, [1.0] * number)) == (rank is not None)
