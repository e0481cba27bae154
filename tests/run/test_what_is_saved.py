"""What becomes ``last.ckpt``: only what is read back, and only rounds whose rows are written."""

from argparse import Namespace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.boring import (
    BoringData,
    BoringModel,
    assert_equal_trees,
    make_model,
    make_trainer,
    read_csv,
    without_times,
)
from lightning.pytorch import Callback

from fedbc_lightning import ConfigurationError, FedAvg
from fedbc_lightning.run import run_writer
from fedbc_lightning.state import checkpoint


class Keeps(Callback):
    """Its state becomes ``value`` in round 2."""

    def __init__(self, value=None):
        self.value, self.kept = value, 0.0

    def on_round_end(self, trainer, pl_module):
        if trainer.current_round == 2:
            self.kept = self.value

    def state_dict(self):
        return {"kept": self.kept, "more": [(self.kept,)]}

    def load_state_dict(self, state_dict):
        self.kept = state_dict["kept"]


class SavesMore(BoringModel):
    """The same in the module's own entries."""

    value = None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"best": self.value if self.trainer.current_round == 2 else 0.0}


def fit(root, callback=None, model=None, **options):
    trainer = make_trainer(root, **{"callbacks": callback, "checkpoint_every_n_rounds": 1, **options})
    trainer.fit(make_model() if model is None else model, BoringData(), FedAvg(), ckpt_path="last")
    return trainer


def saved_round(root):
    return checkpoint.load(root / "default" / "FedAvg-1" / "checkpoints" / "last.ckpt")[checkpoint.KEY]["round"]


def test_a_checkpoint_by_time_is_one_to_go_on_from(tmp_path, monkeypatch):
    """A round takes 40 s of this clock, so that a minute has passed after every second one."""
    clock, saved = SimpleNamespace(seconds=0.0), {}
    monkeypatch.setattr(run_writer, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))

    class Ticks(Callback):
        def on_round_start(self, trainer, pl_module):
            saved[trainer.current_round] = saved_round(tmp_path)
            clock.seconds += 40

    often = {"checkpoint_every_n_rounds": 100, "checkpoint_every_minutes": 1.0}
    fit(tmp_path, Ticks(), max_rounds=6, **often)
    assert saved == {1: 0, 2: 0, 3: 2, 4: 2, 5: 4, 6: 4}
    saved.clear()
    resumed = fit(tmp_path, Ticks(), max_rounds=9, **often)
    assert saved == {7: 6, 8: 6, 9: 8}
    whole = fit(tmp_path / "whole", max_rounds=9)
    for name in ("metrics.csv", "clients.csv"):
        left, right = (without_times(read_csv(Path(run.log_dir) / name)) for run in (resumed, whole))
        assert left == right


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    model = make_model(SavesMore)
    model.value = np.float32(0.25)
    fit(tmp_path, Keeps(np.float64(1.5)), model, max_rounds=2)
    saved = checkpoint.load(tmp_path / "default" / "FedAvg-1" / "checkpoints" / "last.ckpt")
    assert saved["callbacks"] == {"Keeps": {"kept": 1.5, "more": [(1.5,)]}}
    assert saved["mine"] == {"best": 0.25}
    callback = Keeps()
    fit(tmp_path, callback, make_model(SavesMore), max_rounds=3)
    assert type(callback.kept) is float


class Factor(Enum):
    TWO = 2.0


class Setting:
    factor = 2.0


def number(held: Any) -> float:
    """Find the number in a setting, as a constructor that takes many forms does."""
    if isinstance(held, (dict, Namespace)):
        (held,) = (vars(held) if isinstance(held, Namespace) else held).values()
        return number(held)
    if isinstance(held, (list, np.ndarray)) or getattr(held, "ndim", 0):
        return number(held[0])
    attributes = {Factor: "value", Setting: "factor", type(Path()): "name"}
    return 1.0 if held is None else float(getattr(held, attributes[type(held)]) if type(held) in attributes else held)


class Configured(BoringModel):
    """Its weights are multiplied with what a hyper-parameter says, which is a number of some kind."""

    def __init__(self, lr: float = 0.1, setting: Any = None) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.factor = number(setting)


SETTINGS = {
    "number": (np.float64(2), None),
    "nested": ({"a": [np.int64(2)]}, None),
    "text": ("2", None),
    "tensor": (torch.tensor(2), None),
    "array": (np.array([2.0, 3.0]), "hold as plain"),
    "enum": (Factor.TWO, "hold as plain"),
    "path": (Path("2"), "hold as plain"),
    "namespace": (Namespace(a=Path("2")), "hold as plain"),
    "object": (Setting(), "leave out"),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_loaded_model_has_the_hyper_parameters_or_a_line_tells_which_it_lacks(tmp_path, kind, caplog):
    value, line = SETTINGS[kind]
    with caplog.at_level("INFO"):
        trainer = fit(tmp_path, model=make_model(Configured, setting=value), max_rounds=1)
    told = [text for text in caplog.messages if "hyper-parameters setting," in text]
    assert [line] * bool(line) == [line for text in told if f"checkpoints {line}" in text]
    last = f"{trainer.log_dir}/checkpoints/last.ckpt"
    out = trainer.export(make_model(Configured, setting=value), BoringData(), FedAvg(), last)
    given = {"setting": value} if kind in ("object", "path") else {}
    for path in (last, out):
        assert Configured.load_from_checkpoint(path, **given).factor == 2


def test_a_class_that_torch_may_read_is_kept(tmp_path):
    with torch.serialization.safe_globals([Setting]):
        trainer = fit(tmp_path, Keeps(Setting()), make_model(Configured, setting=Setting()), max_rounds=2)
        path = f"{trainer.log_dir}/checkpoints/last.ckpt"
        kept = checkpoint.load(path)["callbacks"]["Keeps"]["kept"]
        assert Configured.load_from_checkpoint(path).factor == kept.factor


class Trimmed(BoringModel):
    """Leaves what is not trained out of its checkpoints."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.backbone = torch.nn.Linear(2, 2).requires_grad_(False)
        self.strict_loading = False

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "backbone" not in name}


def test_a_module_that_loads_loosely_resumes_from_a_trimmed_state(tmp_path):
    whole = make_model(Trimmed)
    fit(tmp_path / "whole", model=whole, max_rounds=3)
    for rounds in (1, 3):
        model = make_model(Trimmed)
        fit(tmp_path / "halves", model=model, max_rounds=rounds)
    assert_equal_trees(model.state_dict(), whole.state_dict())
    last = tmp_path / "halves/default/FedAvg-1/checkpoints/last.ckpt"
    assert "backbone" not in str(checkpoint.load(last)["state_dict"])


@pytest.mark.parametrize("value", [np.random.default_rng(0), lambda: None])
def test_what_is_not_read_back_is_named_and_the_older_checkpoint_stays(tmp_path, value, caplog):
    message = r"\['callbacks'\]\['Keeps'\]\['kept'\] is a \S+; let .*last\.ckpt' stays as it was"
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, Keeps(value))
    assert "while the run was ended" not in caplog.text
    assert saved_round(tmp_path) == 1
    assert not list(tmp_path.rglob("*.tmp"))
    model = make_model(SavesMore)
    model.value = Setting()
    with pytest.raises(ConfigurationError, match=r"\['mine'\]\['best'\] is a \S+Setting; .*add_safe_globals"):
        fit(tmp_path, model=model)
    trainer = fit(tmp_path, Keeps(torch.ones(2)))
    assert [row["round"] for row in read_csv(f"{trainer.log_dir}/metrics.csv")] == ["0", "1", "2", "3"]
