"""Clients' rows in memory and in ``clients.bin``: the same numbers, whatever stops the run."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from helpers.boring import BoringData, assert_equal_trees, make_model, make_trainer, read_csv, without_times
from helpers.programs import TESTS, forked, free_port, run_ranks
from helpers.row_processes import ALGORITHMS, fit, state_of
from lightning.fabric import Fabric

from fedbc_lightning import SCAFFOLD, ConfigurationError
from fedbc_lightning.algorithms import L2SGDPlus, PFedMe
from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.state import client_rows
from fedbc_lightning.state.file_rows import FileRows

ALGORITHMS |= {"pfedme": lambda: PFedMe(penalty=1.0), "l2sgd+": lambda: L2SGDPlus(0.1, 0.3, 0.05)}


@pytest.fixture
def in_file(monkeypatch):
    """From now on rows lie in a file."""

    def switch():
        monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)

    return switch


def rows_path(trainer):
    return Path(trainer.log_dir, "checkpoints", "clients.bin")


def tables(trainer):
    named = {name: read_csv(f"{trainer.log_dir}/{name}.csv") for name in ("metrics", "clients", "evaluation")}
    return {name: without_times(rows) for name, rows in named.items()}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("fedbc", {"buffers": "local", "client_dtype": "bfloat16"}),
        ("scaffold", {"buffers": "local", "keep_local_models": True, "precision": "64-true"}),
        ("ditto", {"client_dtype": "bfloat16", "checkpoint_every_n_rounds": 2}),
        ("pfedme", {"buffers": "global"}),
        ("fedavg+", {"buffers": "local"}),
        ("l2sgd+", {"clients_per_round": 1.0}),
    ],
)
def test_a_file_changes_no_number(tmp_path, in_file, monkeypatch, algorithm, options):
    for name in ("preadv", "pwrite") if algorithm == "ditto" else ():  # as on Windows
        monkeypatch.delattr(os, name, raising=False)
    memory = fit(tmp_path / "memory", algorithm, max_rounds=3, **options)
    assert not rows_path(memory).exists()
    in_file()
    file = fit(tmp_path / "file", algorithm, max_rounds=3, **options)
    assert rows_path(file).exists()
    assert_equal_trees(state_of(memory), state_of(file))
    assert tables(memory) == tables(file)
    fit(tmp_path / "parts", algorithm, max_rounds=2, **options)
    again = fit(tmp_path / "parts", algorithm, "last", max_rounds=3, **options)
    assert_equal_trees(state_of(memory), state_of(again))
    assert tables(memory) == tables(again)


def test_rows_in_bfloat16_are_rounded_and_start_values_are_not(tmp_path):
    trainer = fit(tmp_path, max_rounds=1, client_dtype="bfloat16", seed=2)
    trained = {int(row["client"]) for row in read_csv(f"{trainer.log_dir}/clients.csv")}
    initial = trainer.layout.vector_from(dict(make_model().named_parameters()))
    for client in range(6):
        row = trainer.clients.vector("local_model", client)
        assert torch.equal(row, row.bfloat16().float()) == (client in trained)
        assert torch.equal(row[: len(initial)], initial) == (client not in trained)


def test_a_mask_that_is_kept_as_infinity_loses_no_client(tmp_path):
    model, trainer = make_model(), make_trainer(tmp_path, client_dtype="bfloat16")
    model.register_buffer("mask", torch.tensor(torch.finfo(torch.float32).min))
    trainer.fit(model, BoringData(), ALGORITHMS["fedbc"]())
    assert {row["status"] for row in read_csv(f"{trainer.log_dir}/clients.csv")} == {"ok"}


def test_local_models_are_evaluated_from_the_file(tmp_path, in_file):
    in_file()
    trainer = fit(tmp_path)
    last = Path(trainer.log_dir, "checkpoints", "last.ckpt")
    last_row = read_csv(f"{trainer.log_dir}/metrics.csv")[-1]
    expected = {name: float(value) for name, value in last_row.items() if name.endswith(("/global", "/local"))}
    model = make_model()
    for found in (
        trainer.test(model, BoringData(), ALGORITHMS["fedbc"](), ckpt_path=last),
        trainer.test(model, BoringData(), ALGORITHMS["fedbc"]()),  # of the fit before
    ):
        assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert any(name.endswith("/local") for name in expected)


# the file itself


def storage(path, num_clients=4, length=3, checkpoint=None):
    """A FileRows with one vector ``x``; ``checkpoint``: what it resumes from."""
    rows = FileRows({"x": torch.zeros(length)}, {"x": torch.float32}, num_clients)
    if checkpoint is not None:
        rows.load_state_dict(checkpoint, "last.ckpt", path)
    rows.open(path, Fabric(accelerator="cpu", devices=1))
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events_keeps_the_rows(tmp_path, seed):
    """Against dictionaries: rounds that commit or are taken back, checkpoints in between, deaths at any time."""
    rng, path = random.Random(seed), tmp_path / "clients.bin"
    rows, current = storage(path), {}
    rows.mark_saved()
    saved, checkpoint = {}, rows.state_dict()
    for step in range(300):
        staged = {client: float(step) for client in rng.sample(range(4), rng.randint(0, 4))}
        for client, value in staged.items():
            rows.stage("x", [client], torch.full((1, 3), value))
        for client in range(4):
            assert rows.read("x", client)[0] == current.get(client, 0.0)
            assert rows.read("x", client, staged=True)[0] == (current | staged).get(client, 0.0)
        event = rng.choice(["commit", "commit", "commit", "rollback", "die"])
        if event == "commit":
            rows.commit()
            current |= staged
        elif event == "rollback":
            rows.rollback()
        else:
            rows, current = storage(path, checkpoint=checkpoint), dict(saved)
        if event == "commit" and rng.random() < 0.4:
            rows.sync()
            saved, checkpoint = dict(current), rows.state_dict()
            if rng.random() < 0.8:  # else it dies between the commit and what follows
                rows.mark_saved()
            else:
                rows = storage(path, checkpoint=checkpoint)


def test_the_file_takes_as_much_disk_as_rows_were_written(tmp_path):
    rows = storage(tmp_path / "clients.bin", num_clients=1_000_000, length=2048)
    for client in range(0, 1_000_000, 50_000):
        rows.stage("x", [client], torch.full((1, 2048), float(client)))
    rows.commit()
    rows.sync()
    size = os.stat(tmp_path / "clients.bin")
    assert size.st_size > 1_000_000 * 2048 * 4
    assert size.st_blocks * 512 <= 20 * (2048 * 4 + 4096) + 64 * 1024
    assert rows.read("x", 950_000)[7] == 950_000
    assert not rows.read("x", 3).any()


def refused(root, checkpoint, message, **options):
    """By a fit that would go on, and by a test."""
    for act in ("fit", "test"):
        trainer = make_trainer(root, **options)
        with pytest.raises(ConfigurationError, match=message):
            getattr(trainer, act)(make_model(), BoringData(), ALGORITHMS["fedbc"](), checkpoint)


def test_what_does_not_belong_together_is_refused(tmp_path, in_file):
    in_file()
    trainer = fit(tmp_path, max_rounds=2, callbacks=RoundCheckpoint("loss/global", "min"))
    folder = Path(trainer.log_dir, "checkpoints")
    path, last = folder / "clients.bin", folder / "last.ckpt"

    refused(tmp_path, folder / "best.ckpt", r"best\.ckpt' holds the global model and the scalars only")
    (tmp_path / "alone").mkdir()
    shutil.copy(last, tmp_path / "alone")
    refused(tmp_path, tmp_path / "alone" / "last.ckpt", "clients.bin', which is not there")
    refused(tmp_path, last, r"holds other rows than this run has\..*client_dtype", client_dtype="bfloat16")
    content = path.read_bytes()
    for changed, message in (
        (content[:-1], "is damaged: it was cut off"),
        (content[:24] + b"?" + content[25:], "is damaged, or of another version: it does not begin"),
    ):
        path.write_bytes(changed)
        refused(tmp_path, last, message)


def test_rows_that_belong_to_no_local_model_are_not_asked_for(tmp_path, in_file):
    """A kept checkpoint evaluates its z; SCAFFOLD's c_i have no part in that."""
    in_file()
    callback = RoundCheckpoint("loss/global", "min")
    trainer = make_trainer(tmp_path, callbacks=callback, keep_local_models=False)
    trainer.fit(make_model(), BoringData(), SCAFFOLD())
    best = Path(trainer.log_dir, "checkpoints", "best.ckpt")
    found = make_trainer(tmp_path, keep_local_models=False).test(make_model(), BoringData(), SCAFFOLD(), best)
    assert found["loss/global"] == pytest.approx(callback.best)


def test_a_copied_checkpoint_with_its_file_starts_a_run_of_its_own(tmp_path, in_file):
    in_file()
    whole = fit(tmp_path / "whole")
    first = fit(tmp_path / "first", max_rounds=4)
    shutil.copytree(Path(first.log_dir, "checkpoints"), tmp_path / "copy")
    before = (tmp_path / "copy" / "clients.bin").read_bytes()
    second = fit(tmp_path / "second", ckpt_path=tmp_path / "copy" / "last.ckpt")
    assert_equal_trees(state_of(whole), state_of(second))
    assert (tmp_path / "copy" / "clients.bin").read_bytes() == before


# several processes


def assert_equal_to_one(folder, names):
    for name in names:
        expected = state_of(fit(folder / "one" / name, name))
        ranks = [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        assert_equal_trees(ranks[0], ranks[1])
        torch.testing.assert_close(ranks[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
def test_two_processes_share_the_file(tmp_path):
    run_ranks(["-m", "helpers.row_processes", "ranks", tmp_path], TESTS)
    assert_equal_to_one(tmp_path, ("fedbc", "scaffold", "ditto"))


@pytest.mark.distributed
def test_two_nodes_share_the_folder_or_are_told(tmp_path):
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    words = ["-m", "helpers.row_processes", "nodes", tmp_path]
    with forked(words, TESTS, NODE_RANK=0, **place) as first, forked(words, TESTS, NODE_RANK=1, **place) as second:
        done = [first.finish(), second.finish()]
    # The script catches the error, which rank 0 alone gets: what all ranks meet is told once, and the others end with 1
    assert [node.returncode for node in done] == [0, 1], done
    assert_equal_to_one(tmp_path, ("fedbc", "fedavg+"))
    message = (tmp_path / "error-0.txt").read_text()
    assert "process 1 does not see the file of process 0" in message
    assert "choose a folder that all nodes share" in message
