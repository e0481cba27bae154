"""Lines about a whole run: nothing is measured, threads cost time, the loss grew."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.boring import BoringData, BoringModel, make_model, make_trainer
from lightning.pytorch import LightningModule

from fedbc_lightning import FedAvg
from fedbc_lightning.run import remarks
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


THREADS = "faster on one"


def test_a_small_model_on_many_threads_is_told_of_the_variable_once(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    text = said(caplog, tmp_path, make_model(), BoringData(), max_rounds=4)
    assert text.count(THREADS) == 1
    assert "torch uses 8 threads." in text


@pytest.mark.parametrize(("threads", "variable"), [(1, None), (8, "OMP_NUM_THREADS"), (8, "MKL_NUM_THREADS")])
def test_who_chose_a_number_of_threads_or_has_one_is_told_nothing(tmp_path, caplog, monkeypatch, threads, variable):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable:
        monkeypatch.setenv(variable, "8")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert THREADS not in said(caplog, tmp_path, make_model(), BoringData())


@pytest.mark.parametrize(("round", "seconds", "is_said"), [(2, 0.001, True), (2, 1000.0, False), (1, 0.001, False)])
def test_a_larger_model_is_told_only_if_its_steps_were_short(tmp_path, caplog, monkeypatch, round, seconds, is_said):
    trainer = make_trainer(tmp_path)
    trainer.fit(make_model(), BoringData(), FedAvg())
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(remarks, "FEW_PARAMETERS", 10)
    with caplog.at_level(logging.INFO):
        remarks.say_that_one_thread_is_faster(trainer._run, round, seconds)
    assert (THREADS in caplog.text) == is_said


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
