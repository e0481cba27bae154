"""Lines about a whole run: nothing is measured, threads cost time, the loss diverged."""

import logging
from typing import Any

import pytest
import torch
from helpers.boring import BoringData, BoringModel, make_model, make_trainer
from lightning.pytorch import LightningModule

from fedbc_lightning import FedAvg
from fedbc_lightning.run import run_warnings
from fedbc_lightning.run.run_warnings import divergence

UNMEASURED = "no round will be measured"
WITHOUT_LOG = "has neither a test_step nor a validation_step that logs a value"


class Unmeasured(BoringModel):
    """A module that forgot its test_step."""

    test_step = LightningModule.test_step


class Silent(BoringModel):
    """A module whose test_step forgot to log."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class Validated(Unmeasured):
    """A module with a validation_step alone, which runs on test data, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class Unstable(BoringModel):
    """A module without a bound on its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net[0](batch[0])[:, 0] - batch[1]).pow(2).mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))


class Untested(BoringData):
    """Clients without test data."""

    def client_test_dataset(self, client: int) -> None:
        return None


def said(caplog: Any, root: Any, model: BoringModel, data: BoringData, **options: Any) -> str:
    with caplog.at_level(logging.INFO):
        make_trainer(root, **options).fit(model, data, FedAvg())
    return caplog.text


@pytest.mark.parametrize(
    ("model", "data", "options", "expected"),
    [
        (Unmeasured, BoringData, {}, f"Unmeasured {WITHOUT_LOG}, so {UNMEASURED}"),
        (BoringModel, Untested, {}, f"There is neither test nor validation data, so {UNMEASURED}"),
        (Silent, BoringData, {}, f"Silent {WITHOUT_LOG}, so {UNMEASURED}"),
        (Validated, BoringData, {}, None),
        (Unmeasured, BoringData, {"eval_every_n_rounds": 0}, None),
    ],
    ids=["no step", "no data", "no log", "validation_step", "no evaluation asked for"],
)
def test_a_run_without_measurements_says_why(tmp_path, caplog, model, data, options, expected):
    text = said(caplog, tmp_path, make_model(model), data(), max_rounds=1, **options)
    assert text.count(UNMEASURED) == (expected is not None)
    assert (expected or "") in text


@pytest.mark.parametrize(
    ("threads", "variable", "few", "is_said"),
    [(8, None, 10_000, True), (1, None, 10_000, False), (8, "MKL_NUM_THREADS", 10_000, False), (8, None, 10, False)],
    ids=["small", "one thread", "chosen", "large"],
)
def test_a_small_model_on_threads_that_nobody_chose_is_told_once(
    tmp_path, caplog, monkeypatch, threads, variable, few, is_said
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv(variable, "8")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(run_warnings, "FEW_PARAMETERS", few)
    text = said(caplog, tmp_path, make_model(), BoringData(), max_rounds=2)
    assert text.count("torch uses 8 threads.") == is_said


def test_a_run_whose_loss_is_not_finite_says_since_when_also_after_a_resume(tmp_path, caplog):
    class Exploding(Unstable):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", float("inf") if self.trainer.current_epoch >= 2 else 1.0)

    with caplog.at_level(logging.INFO):
        result = make_trainer(tmp_path, max_rounds=3).fit(make_model(Exploding, lr=0.1), BoringData(), FedAvg())
        assert "The loss is not finite from round 2 on (" in caplog.messages[-1]
        more = make_trainer(tmp_path, max_rounds=5)
        more.fit(make_model(Exploding, lr=0.1), BoringData(), FedAvg(), ckpt_path=result.checkpoint)
    assert "The loss is not finite from round 2 on (" in caplog.messages[-1]
    assert "loss/global" in caplog.messages[-1]
    assert "smaller learning rate" in caplog.messages[-1]


def rows(**columns: str) -> list[dict[str, str]]:
    names = {"train": "train/loss", "loss": "loss/global", "rmse": "rmse/global", "accuracy": "accuracy/global"}
    cells = [[(names[name], cell) for cell in text.replace("-", "").split(",")] for name, text in columns.items()]
    return [{"round": str(round), **dict(row)} for round, row in enumerate(zip(*cells, strict=True))]


@pytest.mark.parametrize(
    ("columns", "verdict"),
    [
        ({"train": "-,2.3,5e3", "loss": "2.3,-,4.7"}, None),  # other clients may have been sampled
        ({"train": "-,nan,0.5", "loss": "2.3,inf,1.0"}, None),  # it has recovered
        ({"train": "-,2.3,nan"}, "is not finite from round 2 on"),
        ({"train": "-,2.3,1.0,1.0,1.0", "loss": "2.3,nan,1.0,inf,-"}, "is not finite from round 3 on"),
        ({"train": "-,2.3,1.0", "rmse": "2.3,inf,nan"}, "from round 1 on (rmse/global)"),
        ({"accuracy": "0.5,0.5,nan"}, None),
        ({"train": "-"}, None),  # nothing was trained
        ({}, None),
    ],
)
def test_only_what_is_certain_is_said(columns, verdict):
    sentence = divergence(rows(**columns))
    assert (sentence is None) == (verdict is None)
    assert (verdict or "") in (sentence or "")
