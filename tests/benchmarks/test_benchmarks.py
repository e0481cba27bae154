"""The scripts in benchmarks/ on tiny sizes: each prints its table, and what it computes is right."""

import json
import logging
import re
import shlex
from dataclasses import asdict

import numpy as np
import pytest
import torch
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
        if request.param == "methods":
            monkeypatch.setitem(script.METHODS, "Local", script.Method(lrs=(0.1,), personal=True))
            monkeypatch.setattr(script, "ATTACKS", {"random x 5": script.ATTACKS["random x 5"]})
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
        ("evaluation", "--pairs 1 --clients 20 --rounds 3", r"(logistic|MLP)( +[\d.]+){3}   [\d.]+ \(.*\)"),
        ("loading", "--data images --clients 2 --batch-size 5 --repeats 2", r" +2 clients  .* for 24 images .*"),
        (
            "many_clients",
            "--clients 300 --sampled 4 --rounds 6 --logistic 50 --logistic-sampled 5",
            r" +300( +[\d.]+)+",
        ),
        ("methods", "--table methods --quick --only Local --out .", r".*┃ method.*"),
        ("methods", "--table attacks --quick --only Krum --out .", r".*Krum.*"),
        ("processes", "W1 --pairs 1", r"W1 steps/s: one process \d+, two \d+; ratio .*"),
        ("scaling", "--out scaling.png --rounds 2", r"    .* [\d.]+"),
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


@only("engines")
def test_users_evaluate_log_and_save(tiny):
    seen = {}

    class Look(tiny.Callback):
        def on_train_end(self, trainer, pl_module):
            seen[trainer.logger is not None] = sorted(trainer.callback_metrics)

    work = tiny.WORKLOADS["W1"]
    data = tiny.Clients(work.sizes, work.shape)
    for is_as_users in (True, False):
        assert tiny.Way("FedBC", "sequential", is_as_users).speed(work, data, [Look()]) > 0
    assert {"train/accuracy", "accuracy/global"} <= set(seen[True])
    assert not any("accuracy" in name for name in seen[False])


@only("engines")
def test_the_interval_of_a_median(tiny):
    for number, rank in [(4, None), (5, 1), (7, 1), (8, 2), (9, 2), (20, 6)]:  # from the quantiles of fair coins
        values = [float(value) for value in range(number, 0, -1)]
        assert tiny.interval(values) == (None if rank is None else (rank, number + 1 - rank))
        assert ("90 %" in tiny.describe(values, [1.0] * number)) == (rank is not None)
    sizes = tiny.sizes_of_synthetic()
    assert (len(sizes), sizes.min(), sizes.max(), np.median(sizes)) == (30, 40, 3206, 97.5)


@only("processes")
def test_the_best_ratio_shares_whole_clients(tiny):
    for rounds, expected in [([[3, 1, 1]], 5 / 3), ([[2, 2], [4]], 8 / 6), ([[3, 3, 2, 2, 2]], 2.0), ([[5]], 1.0)]:
        assert tiny.best_ratio(rounds) == pytest.approx(expected)


@only("loading")
def test_all_ways_give_the_same_kind_of_images(tiny, tmp_path):
    root = write_image_folder(tmp_path / "images", num_per_class=8)
    for loaders in tiny.prepare(root, 2, 12).values():
        for loader in loaders:
            (inputs, targets), *rest = loader(1)
            assert not rest
            assert (inputs.shape, inputs.dtype, targets.dtype) == ((12, 3, 16, 16), torch.float32, torch.int64)
        targets = torch.cat([next(iter(loader(1)))[1] for loader in loaders])
        assert targets.bincount().tolist() == [8, 8, 8]


@only("methods")
def test_every_exported_method_has_a_grid(tiny):
    names = tiny.method_names()
    assert sorted([*names, "ComposedAlgorithm", "FederatedAlgorithm"]) == sorted(tiny.algorithms.__all__)
    for name in names:
        for point in tiny.METHODS[name].own:
            tiny.make(name, point)


# benchmarks/many_clients.py


@only("many_clients")
def test_clients_are_made_by_index_from_the_seed(tiny):
    for kind in (tiny.GeneratedImages, tiny.GeneratedRows):
        first, again = kind(1000), kind(1000)
        batch = first.client_dataset(7, "train").batch(torch.arange(5))
        other = again.client_dataset(8, "train").batch(torch.arange(5))
        assert torch.equal(batch[0], again.client_dataset(7, "train").batch(torch.arange(5))[0])
        assert not torch.equal(batch[0], other[0])
        assert first.partition_hash() == again.partition_hash() != kind(999).partition_hash()
        assert len(first.client_dataset(7, "train")) == first.num_samples("train")[7]


@only("many_clients")
@pytest.mark.nightly(reason="whole runs by a script that only developers run")
@pytest.mark.usefixtures("forks")
def test_a_difference_after_a_kill_would_be_seen(tiny, tmp_path):
    """In a row, and in last.ckpt."""
    assert [("bitwise equal" in row) for row in list(tiny.killed_rows(300, 20))[1:]] == [True, True]
    run = tiny.Run("images", 300, 2, 1, str(tmp_path))
    run.finish()
    expected = tiny.digests(run)
    assert expected == tiny.digests(tiny.Run(**asdict(run)))
    checkpoints = run.version / "checkpoints"
    content = torch.load(checkpoints / "last.ckpt", weights_only=True)
    slots = content["fedbc_lightning"]["federation"]["clients"]["file"]["slots"]["local_model"]
    client = int(slots.nonzero()[0])
    rows = bytearray((checkpoints / "clients.bin").read_bytes()[: 4096 + 248_024 * (client + 1)])
    rows[-1] ^= 1
    with (checkpoints / "clients.bin").open("r+b") as file:
        file.write(rows)
    changed = tiny.digests(run)
    assert changed["clients.bin"] != expected["clients.bin"]
    assert changed["last.ckpt"] == expected["last.ckpt"]
    next(iter(content["state_dict"].values())).add_(1e-3)
    torch.save(content, checkpoints / "last.ckpt")
    assert tiny.digests(run)["last.ckpt"] != expected["last.ckpt"]


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


@only("gpu")
def test_a_dead_worker_costs_one_measurement(tiny, monkeypatch, tmp_path):
    """The second of three measurements ends the process; the third is made by another one."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "for task in json.loads(sys.argv[2]):\n"
        "    if task['turn'] == 2:\n"
        "        os.abort()\n"
        "    print(json.dumps({'turn': task['turn']}), flush=True)\n"
    )
    monkeypatch.setattr(tiny, "__file__", str(worker))
    tasks = [tiny.Task("W1", "by-hand", turn, "cpu", True, 0.1) for turn in (1, 2, 3)]
    first, second, third = tiny.run_workers(tasks, until=tiny.time.monotonic() + 60)
    assert (first["turn"], third["turn"]) == (1, 3)
    assert second["failed"].startswith("the process ended with -6")


@only("gpu")
def test_the_table_has_medians_and_reasons(tiny, monkeypatch, capsys, tmp_path):
    def line(way, **found):
        return json.dumps({"workload": "W1", "way": way, **found})

    results = tmp_path / "found.jsonl"
    results.write_text("\n".join([
        '{"machine": "a card"}', line("by-hand", steps_per_second=100.0), line("vectorized", steps_per_second=150.0),
        line("vectorized", steps_per_second=250.0, busy=0.5), line("recorded", failed="a | b"), '{"workload": "W1',
    ]))  # fmt: skip
    monkeypatch.setattr("sys.argv", ["gpu.py", "--table", str(results)])
    tiny.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| W1 | by-hand | 100 | 1 |  |  |  |  |  |  |",
        "| W1 | vectorized | 200 | 2 |  |  | 0.5 |  |  |  |",
        "| W1 | recorded | a / b | | | | | | | |",
    ]
