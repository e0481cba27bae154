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


RATIO = r"([\d.]+) \([\d.]+ to [\d.]+\)"


def rows_of(script, monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["engines.py", *words])
    script.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("W1 ")]
    row = rf"W1 (\S+) +\d+ steps/s +/ floor {RATIO}(?:   (time )?/ (\S+) {RATIO})?"
    return [re.fullmatch(row, line) for line in lines]


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
def test_the_table(script, monkeypatch, capsys):
    found = rows_of(script, monkeypatch, capsys, "--pairs", "2")
    ways = [(match[1], match[3], match[4]) for match in found]
    assert [way for way in ways if "auto" not in way[0]] == [
        ("floor", None, None), ("torch.optim", None, None), ("FedAvg", None, None), ("FedBC", None, "FedAvg"),
        ("FedAvg-vectorized", None, None), ("FedBC-vectorized", None, "FedAvg-vectorized"),
        ("FedAvg-users", "time ", "FedAvg"), ("FedBC-users", "time ", "FedBC"),
        ("FedAvg-vectorized-users", "time ", "FedAvg-vectorized"),
        ("FedBC-vectorized-users", "time ", "FedBC-vectorized"),
        ("FedAvg-written", None, "FedAvg"), ("FedBC-written", None, "FedBC"),
    ]  # fmt: skip
    beside = {way: other for way, _, other in ways}
    assert beside["FedAvg-auto"] in ("FedAvg", "FedAvg-vectorized")
    assert beside["FedBC-auto"] in ("FedBC", "FedBC-vectorized")
    assert found[0][2] == "1.00"


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
def test_chosen_ways_of_one_workload(script, monkeypatch, capsys):
    found = rows_of(script, monkeypatch, capsys, "W1", "--ways", "*-users", "FedBC-auto", "--pairs", "1", "--wall")
    assert [match[1] for match in found] == [
        "floor", "FedBC-auto", "FedAvg-users", "FedBC-users", "FedAvg-vectorized-users", "FedBC-vectorized-users",
    ]  # fmt: skip
    assert {match[4] for match in found} == {None}  # what they are compared with is not timed
    assert script.CLOCK is script.time.perf_counter


def test_users_evaluate_log_and_save(script, monkeypatch):
    seen = {}

    class Look(script.Callback):
        def on_train_end(self, trainer, pl_module):
            seen[trainer.logger is not None] = sorted(trainer.callback_metrics)

    work = script.WORKLOADS["W1"]
    data = script.Clients(work.sizes, work.shape)
    for is_as_users in (True, False):
        assert script.Way("FedBC", "sequential", is_as_users).speed(work, data, [Look()]) > 0
    assert {"train/accuracy", "accuracy/global"} <= set(seen[True])
    assert not any("accuracy" in name for name in seen[False])


def test_the_sizes_of_synthetic(script):
    sizes = script.sizes_of_synthetic()
    assert (len(sizes), sizes.min(), sizes.max(), script.np.median(sizes)) == (30, 40, 3206, 97.5)


def test_the_profile(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["engines.py", "--profile", "--ways", "FedBC", "FedBC-vectorized"])
    script.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(":")[0] for line in lines if "profiler" in line] == ["W1 FedBC", "W1 FedBC-vectorized"]
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


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
@pytest.mark.usefixtures("forks")
def test_a_peer_that_fails_is_named(script):
    with pytest.raises(RuntimeError, match=r"(?s)Flower failed on W9:.*invalid choice: 'W9'"):
        script.speed_of_peer("Flower", "W9")


def test_no_peer_is_there(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "find_spec", lambda package: None)
    for words, said in (
        (["--peers"], "none is installed; pip install"),
        (["--peers", "--threads", "2"], "have one thread"),
    ):
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
