"""Checkpoints, models and reports may lie in an object store."""

import re

import fsspec
from helpers.boring import read_csv
from helpers.command_line import run_cli

KEEPS = "[{class_path: RoundCheckpoint, init_args: {monitor: null, filename: last.ckpt, dirpath: 'memory://kept'}}]"


def test_a_run_goes_on_from_a_store(project):
    store = fsspec.filesystem("memory").store
    for name, *options in (
        ("whole", "--trainer.max_rounds", 4),
        ("part", "--trainer.callbacks", KEEPS),
        ("rest", "--trainer.max_rounds", 4, "--ckpt_path", "memory://kept/last.ckpt"),
    ):
        assert run_cli("fit", "--config", "tiny.yaml", "--trainer.name", name, *options) == 0
    rows = [read_csv(f"runs/{name}/FedAvg-0/metrics.csv") for name in ("whole", "rest")]
    old, new = ([{k: v for k, v in row.items() if "time/" not in k} for row in found] for found in rows)
    assert new == old[3:]
    export = ["export", "--ckpt_path", "runs/part/FedAvg-0", "--out", "memory://kept/z.ckpt"]
    assert [run_cli(*export), run_cli(*export)] == [0, 1]
    assert run_cli("report", "runs/part/FedAvg-0", "--output", "memory://kept/page.html") == 0
    assert sorted(store) == ["/kept/last.ckpt", "/kept/page.html", "/kept/z.ckpt"]
    assert not list(project.glob("*:"))  # what is a URL is no folder here
    store.clear()


def test_where_a_store_cannot_be_is_said_before_anything_is_made(project, capfd):
    keeps = KEEPS.replace("memory://kept", f"file://{project}/new/folder")
    options = ["--trainer.callbacks", keeps, "--trainer.eval_every_n_rounds", 0]
    assert run_cli("fit", "--config", "tiny.yaml", *options) == 0
    assert (project / "new" / "folder" / "last.ckpt").is_file()
    assert run_cli("test", "--config", "tiny.yaml", "--ckpt_path", f"file://{project}/none.ckpt") == 1
    assert f"'file://{project}/none.ckpt' cannot be found" in capfd.readouterr().err
    files = {*project.rglob("*")}
    for option in ("name", "default_root_dir"):
        assert run_cli("fit", "--config", "tiny.yaml", f"--trainer.{option}", "s3://b/x") == 1
        assert re.search(f"trainer.{option}: .*'s3://b/x'", capfd.readouterr().err)
    assert run_cli("partition", "--config", "tiny.yaml", "--out", "memory://p") == 0
    assert "memory://p/partition.png" in capfd.readouterr().out
    assert {*project.rglob("*")} == files
