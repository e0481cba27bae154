"""The scripts in benchmarks/ on tiny sizes: each prints its table, and what it computes is right."""

import json
import logging
import re
import shlex

import numpy as np
import pytest
from helpers.data_formats import write_image_folder
from helpers.scripts import imported_script


@pytest.fixture
def tiny(request, monkeypatch):
    """A script of the given name, with small workloads in place of its own."""
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "level", logger.level)  # some scripts silence Lightning
    with imported_script(f"benchmarks/{request.param}.py") as script:
        if request.param == "engines":
            work = script.Workload(np.array([30, 20, 45]), (60,), script._logistic, 2, 2, rounds=2, warm_up=1)
            monkeypatch.setattr(script, "WORKLOADS", {"W1": work})
        if request.param == "evaluation":
            monkeypatch.setattr(script, "CASES", {name: script.CASES[name] for name in ("logistic", "MLP")})
        if request.param == "startup":
            monkeypatch.setattr(script, "LIGHTNING", ["-c", "pass"])  # takes seconds
        if request.param == "scaling":
            few = {"logistic": {k: script.Point(20, 4, epochs=300, devices=k) for k in (1, 2)}}
            monkeypatch.setattr(script, "panels", lambda: {"processes": script.Panel("two", "processes", few)})
        yield script


def only(*names):
    return pytest.mark.parametrize("tiny", names, indirect=True)


@pytest.mark.nightly(reason="whole tables by scripts that only developers run")
@pytest.mark.parametrize(
    ("tiny", "words", "rows"),
    [
        ("engines", "--pairs 1", r"W1 \S+ +\d+ steps/s +/ floor [\d.]+ .*"),
        ("engines", "--profile --ways FedBC", r" *[\d.]+ ?%.*"),
        ("cohort_steps", "cnn --clients 2 --seconds 0.01 --turns 1", r"\| cnn \| 2 (\| [\d.]+ \([\d.]+\) ){4}\|"),
        ("evaluation", "--pairs 1 --clients 20 --rounds 3", r"(logistic|MLP)( +[\d.]+){3}   [\d.]+ \(.*\)"),
        ("large", "MLP --millions 1 --rounds 1", r"MLP +[\d,]+ +.* sizes   plan .*"),
        ("loading", "--data images --clients 2 --batch-size 5 --repeats 2", r" +2 clients  .* for 24 images .*"),
        (
            "many_clients",
            "--clients 300 --sampled 4 --rounds 6 --logistic 50 --logistic-sampled 5",
            r" +300( +[\d.]+)+",
        ),
        ("processes", "W1 --pairs 1", r"W1 steps/s: one process \d+, two \d+; ratio .*"),
        ("scaling", "--out scaling.png --rounds 2", r"    .* [\d.]+"),
        ("uneven", "--rounds 5", r"two processes, by seconds: [\d.]+ s"),
        ("startup", "help import --repeats 2", r"(help|import) +[\d.]+ s \(.* to .*\)   / lightning .*"),
    ],
    indirect=["tiny"],
)
def test_a_table(tiny, words, rows, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    write_image_folder(tmp_path / "images", num_per_class=8)
    monkeypatch.setattr("sys.argv", ["script.py", *shlex.split(words)])
    tiny.main()
    out = capsys.readouterr().out
    assert re.search(rf"^{rows}$", out, re.MULTILINE), out


# benchmarks/gpu.py, on a CPU


@only("gpu")
def test_each_measurement_is_a_line_and_a_finished_workload_is_skipped(tiny, monkeypatch, capsys, tmp_path):
    missing = {"by-hand-graph": "no CUDA graphs", "pfl-research": "pfl"}
    results, printed = tmp_path / "gpu.jsonl", []
    words = ["gpu.py", "pfl-cifar", "--device", "cpu", "--scale", "tiny", "--results", str(results)]
    monkeypatch.setattr("sys.argv", words)
    for _ in range(2):
        tiny.main()
        printed.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    machine, *lines = printed[0]
    assert printed[1] == [machine]
    assert [line.get("way") for line in lines] == [*tiny.WAYS, None]
    for line in lines[:-1]:
        if line["way"] in missing:
            assert missing[line["way"]] in line.get("failed", missing[line["way"]])
        else:
            assert line["steps_per_second"] > 0, line
