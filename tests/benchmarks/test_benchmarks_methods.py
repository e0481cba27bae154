"""benchmarks/methods.py: no method is forgotten, and a run leaves what the next one goes on from."""

from __future__ import annotations

import json
import logging

import pytest
from helpers.scripts import imported_script


@pytest.fixture(scope="module")
def methods():
    with imported_script("benchmarks/methods.py") as module:
        yield module


@pytest.fixture(autouse=True)
def restore_loggers(monkeypatch):
    """main() silences Lightning."""
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "level", logger.level)


def test_every_exported_method_has_a_grid(methods, monkeypatch):
    names = methods.method_names()
    assert sorted([*names, "ComposedAlgorithm", "FederatedAlgorithm"]) == sorted(methods.algorithms.__all__)
    for name in names:
        for point in methods.METHODS[name].own:
            methods.make(name, point)
    monkeypatch.delitem(methods.METHODS, "FedProx")
    with pytest.raises(KeyError, match="FedProx"):
        methods.method_names()


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
def test_quick_runs_and_goes_on(methods, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(methods.METHODS, "Local", methods.Method(lrs=(0.1,), personal=True))
    monkeypatch.setitem(methods.METHODS, "FedLiLU", methods.Method(methods.grid(server_lr=[0.1]), lrs=()))
    methods.main(["--table", "methods", "--quick", "--only", "FedLiLU", "Local", "--out", str(tmp_path)])
    lines = (tmp_path / "methods.jsonl").read_text().splitlines()
    runs = [json.loads(line)["run"] for line in lines]
    assert [(run["method"], run["stage"]) for run in runs] == [
        ("FedLiLU", "final"),
        ("Local", "tune"),
        ("Local", "tune"),
        ("Local", "final"),
    ]
    table = (tmp_path / "methods.md").read_text()
    assert table.count("\n| ") == 4
    assert "| FedLiLU | server_lr=0.1 |" in table
    (tmp_path / "methods.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # killed while writing
    methods.main(["--table", "methods", "--quick", "--only", "FedLiLU", "Local", "--out", str(tmp_path)])
    assert [json.loads(line)["run"] for line in (tmp_path / "methods.jsonl").read_text().splitlines()] == runs
    assert "┃ method" in capsys.readouterr().out


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
def test_a_round_of_attacks(methods, tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "ATTACKS", {"random x 5": methods.ATTACKS["random x 5"]})
    methods.main(["--table", "attacks", "--quick", "--only", "Krum", "--out", str(tmp_path)])
    lines = (tmp_path / "attacks.md").read_text().splitlines()
    assert lines[2] == "| data | rule | random x 5 |"
    assert [line.split(" | ")[1] for line in lines[4:]] == ["Krum", "Krum"]
    (first, _) = map(json.loads, (tmp_path / "attacks.jsonl").read_text().splitlines())
    assert 0 <= first["result"]["honest_final"] <= first["result"]["honest_best"] <= 1


def test_unknown_name(methods, capsys):
    with pytest.raises(SystemExit):
        methods.main(["--only", "FedAverage"])
    assert "unknown FedAverage" in capsys.readouterr().err
