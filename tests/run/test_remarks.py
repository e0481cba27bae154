"""Lines about a whole run: nothing is measured, the loss grew."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from helpers.boring import BoringData, BoringModel, make_model, make_trainer
from lightning.pytorch import LightningModule

from fedbc_lightning import FedAvg
from fedbc_lightning.run.remarks import say_that_it_diverged

UNMEASURED = "no round will be measured"


class Unmeasured(BoringModel):
    """A module that forgot its test_step."""

    test_step = LightningModule.test_step


class Validated(Unmeasured):
    """A module with a validation_step alone, which runs on test data, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class Untested(BoringData):
    """Clients without test data."""

    def client_test_dataset(self, client: int) -> None:
        return None


def said(caplog: Any, root: Any, model: BoringModel, data: BoringData, **options: Any) -> str:
    with caplog.at_level(logging.INFO):
        make_trainer(root, **options).fit(model, data, FedAvg())
    return caplog.text


def test_a_module_without_a_step_to_measure_is_told_which_to_write(tmp_path, caplog):
    text = said(caplog, tmp_path, make_model(Unmeasured), BoringData())
    assert text.count(UNMEASURED) == 1
    assert "Unmeasured has neither test_step nor validation_step" in text
    assert "test_step(self, batch, batch_idx)" in text


def test_data_without_a_split_to_measure_on_is_told(tmp_path, caplog):
    assert f"there is neither test nor validation data, so {UNMEASURED}" in said(
        caplog, tmp_path, make_model(), Untested()
    )


@pytest.mark.parametrize(
    ("model", "options"),
    [(BoringModel, {}), (Validated, {}), (Unmeasured, {"eval_every_n_rounds": 0})],
    ids=["test_step", "validation_step", "no evaluation asked for"],
)
def test_who_measures_or_asked_for_none_is_told_nothing(tmp_path, caplog, model, options):
    assert UNMEASURED not in said(caplog, tmp_path, make_model(model), BoringData(), **options)


def test_a_run_whose_loss_grew_says_so_as_its_last_line(tmp_path, caplog):
    class Unstable(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.net[0](batch[0])[:, 0] - batch[1]).pow(2).mean()

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.training_step(batch, batch_idx))

    said(caplog, tmp_path, make_model(Unstable, lr=1.5), BoringData())
    last = caplog.messages[-1]
    assert last.startswith("The loss grew in training: train/loss from ")
    assert ", loss/global from " in last
    assert "smaller learning rate" in last


@pytest.mark.parametrize(
    ("first", "last", "verdict"),
    [
        ({"train/loss": 2.3, "loss/global": 2.3}, {"train/loss": 2.4, "loss/global": 4.7}, "grew"),
        ({"train/loss": 2.3, "loss/global": 2.3}, {"train/loss": 0.1, "loss/global": 4.7}, None),  # it overfits
        ({"train/loss": 2.3, "loss/global": 2.3}, {"train/loss": 3.0, "loss/global": 1.7}, None),  # other clients
        ({"train/loss": 2.3, "loss/global": 2.3}, {"train/loss": 2.4, "loss/global": 2.4}, None),  # not yet learned
        ({"train/loss": 2.3}, {"train/loss": 5e3}, "grew"),
        ({"train/loss": 2.3}, {"train/loss": 50.0}, None),
        ({"train/loss": -1.0}, {"train/loss": 5e3}, None),  # a likelihood's density: no factor
        ({"train/loss": 2.3}, {"train/loss": float("nan")}, "is not finite"),
        ({"train/loss": 2.3, "loss/global": 2.3}, {"train/loss": 1.0, "loss/global": float("inf")}, "is not finite"),
        ({}, {"train/loss": 2.3}, None),  # nothing was trained
    ],
)
def test_only_what_is_certain_is_said(caplog, first, last, verdict):
    with caplog.at_level(logging.INFO):
        say_that_it_diverged(first, last)
    assert bool(caplog.text) == bool(verdict)
    assert (verdict or "") in caplog.text
