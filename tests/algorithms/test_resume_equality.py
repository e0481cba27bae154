"""Fit R rounds equals fit r rounds and resume to R, bit for bit (ALGORITHMS 4.4)."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.marks import of_each
from helpers.quadratics import QuadraticData, QuadraticModule
from lightning.pytorch import Callback

from algorithms.registry import BY_NAME, METHODS
from algorithms.running import QUIET
from fedbc_lightning.state import client_rows

FIRST, TOTAL = 3, 7


def run(root: Path, build: Any, rounds: int, ckpt_path: str | None = None, **options: Any) -> Any:
    """Fit up to ``rounds`` in all, with checkpoints."""
    from fedbc_lightning import FederatedTrainer

    settings = {
        "max_rounds": rounds,
        "clients_per_round": 2,
        "local_epochs": 2,
        "enable_checkpointing": True,
        "default_root_dir": str(root),
        "seed": 3,
    }
    trainer = FederatedTrainer(**QUIET | settings | options)
    data = QuadraticData(batch_size=2)
    trainer.fit(QuadraticModule(), datamodule=data, algorithm=build(), ckpt_path=ckpt_path)
    return trainer


def last(trainer: Any) -> Path:
    return Path(trainer.log_dir) / "checkpoints" / "last.ckpt"


def rows(trainer: Any, name: str) -> list[dict[str, str]]:
    """A CSV without its times."""
    with (Path(trainer.log_dir) / name).open() as file:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two checkpoints differ, bitwise for tensors; what says when or where a run ran is left out."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        return [] if same and left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes() else [path]
    if isinstance(left, dict) and isinstance(right, dict):
        out = [f"{path}/{key}" for key in left.keys() ^ right.keys()]
        for key in left.keys() & right.keys():
            if not any(word in str(key) for word in ("time", "csv", "bytes", "dir", "max_rounds", "hyper_parameters")):
                out += differences(left[key], right[key], f"{path}/{key}")
        return out
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        return [
            found
            for k, (a, b) in enumerate(zip(left, right, strict=True))
            for found in differences(a, b, f"{path}[{k}]")
        ]
    same_number = (
        isinstance(left, float)
        and isinstance(right, float)
        and np.float64(left).tobytes() == np.float64(right).tobytes()
    )
    return [] if same_number or left == right else [f"{path}: {left!r} != {right!r}"]


def assert_resumes(root: Path, build: Any, first: int = FIRST, total: int = TOTAL, **options: Any) -> Any:
    """Every tensor of the last checkpoint and every row of both tables; the unbroken run, and the last checkpoint."""
    whole = run(root / "whole", build, total, **options)
    stopped = run(root / "parts", build, first, **options)
    assert stopped.current_round == first
    resumed = run(root / "parts", build, total, ckpt_path=str(last(stopped)), **options)
    assert (resumed.current_round, resumed.log_dir) == (total, stopped.log_dir)
    loaded = [torch.load(last(trainer), weights_only=True, map_location="cpu") for trainer in (whole, resumed)]
    assert differences(*loaded) == []
    for name in ("metrics.csv", "clients.csv"):
        assert rows(whole, name) == rows(resumed, name), name
    assert [int(row["round"]) for row in rows(resumed, "metrics.csv")] == list(range(total + 1))
    return whole, str(last(resumed))


@of_each(METHODS)
def test_resumed_run_equals_unbroken_run(tmp_path, setting):
    assert_resumes(tmp_path, setting.build, **setting.options)


class Failing(Callback):
    """Its hook ends a round with an error; it counts before."""

    def __init__(self, hook, round=None):
        self.round, self.seen = round, []
        setattr(self, hook, self.fail)

    def fail(self, trainer, *args):
        self.seen.append(trainer.current_round)
        if trainer.current_round == self.round:
            raise RuntimeError("power cut")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("hook", ["on_client_end", "on_validation_start", "on_round_end", "on_validation_end"])
def test_an_exception_in_a_round_leaves_the_round_before(tmp_path, monkeypatch, hook, in_file):
    """Rounds commit atomically, with their last hooks: the run resumes from the last round that ended."""
    monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0 if in_file else client_rows.IN_MEMORY_BELOW)
    setting = BY_NAME["fedbc-momentum-public-learned"]
    options = setting.options | {"eval_every_n_rounds": 1, "checkpoint_every_n_rounds": 5}
    never = {"enable_checkpointing": False}  # when a checkpoint is written changes no number
    whole = run(tmp_path / "whole", setting.build, TOTAL, callbacks=Failing(hook), **options | never)
    for failing in (FIRST + 1, TOTAL):
        with pytest.raises(RuntimeError, match="power cut"):
            run(tmp_path / "parts", setting.build, TOTAL, "last", callbacks=Failing(hook, failing), **options)
        saved = torch.load(next(tmp_path.glob("parts/**/last.ckpt")), weights_only=True)
        assert saved["epoch"] == max(saved["callbacks"]["Failing"]["seen"]) == failing - 1
    resumed = run(tmp_path / "parts", setting.build, TOTAL, "last", callbacks=Failing(hook), **options)
    states = [
        (run.callbacks[0].seen, run.server.values, [run.clients.gather(name) for name in run.clients.names])
        for run in (whole, resumed)
    ]
    assert differences(*states) == []
    assert all(rows(whole, name) == rows(resumed, name) for name in ("metrics.csv", "clients.csv"))
