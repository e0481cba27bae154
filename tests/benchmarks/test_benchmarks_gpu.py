"""benchmarks/gpu.py on a CPU with tiny sizes: a line for each measurement, whatever fails, and resumed runs."""

import json

import pytest
from helpers.scripts import imported_script

MISSING = {"by-hand-graph": "no CUDA graphs", "pfl-research": "pfl"}
"""Ways that a CPU without pfl-research does not have, and a part of the reason."""


@pytest.fixture
def script():
    with imported_script("benchmarks/gpu.py") as module:
        yield module


@pytest.fixture
def lines_of(script, monkeypatch, capsys, tmp_path):
    def run(*words):
        results = tmp_path / "gpu.jsonl"
        monkeypatch.setattr("sys.argv", ["gpu.py", *words, "--results", str(results)])
        script.main()
        printed = capsys.readouterr().out
        assert results.read_text().endswith(printed)
        return [json.loads(line) for line in printed.splitlines()]

    return run


@pytest.mark.parametrize(
    "workloads",
    [("pfl-cifar",), pytest.param((), marks=pytest.mark.nightly(reason="all workloads of a script of developers"))],
)
def test_each_measurement_is_a_line_and_a_finished_workload_is_skipped(script, lines_of, workloads):
    words = [*workloads, "--device", "cpu", "--scale", "tiny"]
    machine, *lines = lines_of(*words)
    assert machine["machine"] == "CPU"
    expected = [(name, way) for name in workloads or script.CASES for way in [*script.WAYS, None]]
    assert [(line["workload"], line.get("way")) for line in lines] == expected
    for line in lines:
        if line.get("way") in MISSING:
            assert MISSING[line["way"]] in line.get("failed", MISSING[line["way"]])
        elif "way" in line:
            assert line["steps_per_second"] > 0, line
    assert lines_of(*words) == [machine]


def test_a_dead_worker_costs_one_measurement(script, monkeypatch, tmp_path):
    """The second of three measurements ends the process; the third is made by another one."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "for task in json.loads(sys.argv[2]):\n"
        "    if task['turn'] == 2:\n"
        "        os.abort()\n"
        "    print(json.dumps({'turn': task['turn']}), flush=True)\n"
    )
    monkeypatch.setattr(script, "__file__", str(worker))
    tasks = [script.Task("W1", "by-hand", turn, "cpu", True, 0.1) for turn in (1, 2, 3)]
    first, second, third = script.run_workers(tasks, until=script.time.monotonic() + 60)
    assert (first["turn"], third["turn"]) == (1, 3)
    assert second["failed"].startswith("the process ended with -6")


def test_a_workload_without_time_is_not_finished(script, lines_of):
    words = ["W1", "--device", "cpu", "--scale", "tiny", "--minutes", "0"]
    for _ in range(2):
        _, *lines = lines_of(*words)
        assert [line["way"] for line in lines] == script.WAYS
        assert all("start again" in line["failed"] for line in lines)


def test_the_table_has_medians_and_reasons(script, monkeypatch, capsys, tmp_path):
    def line(way, **found):
        return json.dumps({"workload": "W1", "way": way, **found})

    results = tmp_path / "found.jsonl"
    results.write_text("\n".join([
        '{"machine": "a card"}', line("by-hand", steps_per_second=100.0), line("vectorized", steps_per_second=150.0),
        line("vectorized", steps_per_second=250.0, busy=0.5), line("recorded", failed="a | b"), '{"workload": "W1',
    ]))  # fmt: skip
    monkeypatch.setattr("sys.argv", ["gpu.py", "--table", str(results)])
    script.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| W1 | by-hand | 100 | 1 |  |  |  |  |  |  |",
        "| W1 | vectorized | 200 | 2 |  |  | 0.5 |  |  |  |",
        "| W1 | recorded | a / b | | | | | | | |",
    ]


def test_what_is_read_from_a_trace(script):
    events = [
        {"ph": "M", "name": "process_name"}, {"cat": "kernel", "name": "gemm", "dur": 30},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "dur": 10.5}, {"cat": "cuda_runtime", "name": "cudaLaunchKernel"},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "dur": 7},
    ]  # fmt: skip
    counts, seconds = script.count_events(events)
    assert sum(counts[name] for name in script.WAITS) == 1
    assert (counts["on the GPU"], seconds) == (2, 40.5e-6)
