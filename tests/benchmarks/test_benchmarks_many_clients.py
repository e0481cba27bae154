"""benchmarks/many_clients.py and scaling.py: their tables, at small sizes, and that a difference would be seen."""

import re
import shlex
from dataclasses import asdict

import pytest
import torch
from helpers.scripts import imported_script

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def many_clients():
    with imported_script("benchmarks/many_clients.py") as module:
        yield module


@pytest.fixture
def scaling():
    with imported_script("benchmarks/scaling.py") as module:
        yield module


def test_clients_are_made_by_index_from_the_seed(many_clients):
    for kind in (many_clients.GeneratedImages, many_clients.GeneratedRows):
        first, again = kind(1000), kind(1000)
        batch = first.client_dataset(7, "train").batch(torch.arange(5))
        other = again.client_dataset(8, "train").batch(torch.arange(5))
        assert torch.equal(batch[0], again.client_dataset(7, "train").batch(torch.arange(5))[0])
        assert not torch.equal(batch[0], other[0])
        assert first.partition_hash() == again.partition_hash() != kind(999).partition_hash()
        assert len(first.client_dataset(7, "train")) == first.num_samples("train")[7]
    assert batch[1].dtype == torch.int64
    assert many_clients.GeneratedImages(3).client_train_dataset(0).pool.tensors[0].dtype == torch.uint8


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
@pytest.mark.slow
def test_the_tables_and_a_killed_run(many_clients, capsys):
    many_clients.main(shlex.split("--clients 300 --sampled 4 --rounds 6 --logistic 50 --logistic-sampled 5"))
    lines = capsys.readouterr().out.splitlines()
    images = re.fullmatch(r" +300 +(\d+) +\d+ +(\d+) +([\d.]+)(?: +[\d.]+){8}", lines[2])
    assert float(images[3]) == pytest.approx(int(images[2]) / int(images[1]), abs=2e-3)
    assert [line.split()[0] for line in lines[5:]] == ["sequential", "vectorized"]

    rows = list(many_clients.killed_rows(300, 20))
    assert rows[0].startswith("killed by SIGKILL with ")
    assert [("bitwise equal" in row) for row in rows[1:]] == [True, True]


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
def test_a_difference_is_seen(many_clients, tmp_path):
    """In a row, and in last.ckpt."""
    run = many_clients.Run("images", 300, 2, 1, str(tmp_path))
    run.finish()
    expected = many_clients.digests(run)
    assert expected == many_clients.digests(many_clients.Run(**asdict(run)))
    checkpoints = run.version / "checkpoints"
    content = torch.load(checkpoints / "last.ckpt", weights_only=True)
    slots = content["fedbc_lightning"]["federation"]["clients"]["file"]["slots"]["local_model"]
    client = int(slots.nonzero()[0])
    rows = bytearray((checkpoints / "clients.bin").read_bytes()[: 4096 + 248_024 * (client + 1)])
    rows[-1] ^= 1
    with (checkpoints / "clients.bin").open("r+b") as file:
        file.write(rows)
    changed = many_clients.digests(run)
    assert changed["clients.bin"] != expected["clients.bin"]
    assert changed["last.ckpt"] == expected["last.ckpt"]
    next(iter(content["state_dict"].values())).add_(1e-3)
    torch.save(content, checkpoints / "last.ckpt")
    assert many_clients.digests(run)["last.ckpt"] != expected["last.ckpt"]


def test_a_failure_says_why(many_clients, tmp_path):
    with pytest.raises(RuntimeError, match="clients_per_round"):
        many_clients.measure(many_clients.Run("logistic", 3, 5, 1, str(tmp_path)))


@pytest.mark.nightly(reason="whole tables by a script that only developers run")
@pytest.mark.slow
def test_the_scaling_plots(scaling, tmp_path, monkeypatch, capsys):
    few = {name: {k: scaling.Point(20, 4, epochs=300, devices=k) for k in (1, 2)} for name in ("logistic",)}
    both = {engine: {20: scaling.Point(20, 4, 8, 300, engine)} for engine in scaling.COLORS}
    chosen = {"d": scaling.Panel("MLPs", "parameters d", both), "processes": scaling.Panel("two", "processes", few)}
    monkeypatch.setattr(scaling, "panels", lambda: chosen)
    scaling.main(["--out", str(tmp_path / "scaling.png"), "--rounds", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert len(lines) == 4
    assert all(float(line.split()[-1]) > 0 for line in lines)
    assert (tmp_path / "scaling.png").stat().st_size > 5000


def test_the_points_of_the_plots(scaling):
    points = [p for panel in scaling.panels().values() for of in panel.curves.values() for p in of.values()]
    parameters = [point.num_parameters for point in points]
    assert (min(parameters), max(parameters)) == (610, 990_730)
    assert max(point.num_clients for point in points) == 1_000_000
    assert {point.num_sampled for point in points} >= {10, 100, 1000, 10_000}
