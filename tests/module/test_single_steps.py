"""A client that takes one step in a round with Adam is told of, for each round gives it a new optimizer."""

import pytest
import torch
from helpers.boring import BoringData, make_model, make_trainer

from fedbc_lightning import FedAvg
from fedbc_lightning.algorithms import Centralized


def said(tmp_path, caplog, optimizer, algorithm=None, **settings):
    model = make_model()
    model.configure_optimizers = lambda: optimizer(model.parameters(), 0.01)
    make_trainer(tmp_path, **settings).fit(model, BoringData(), algorithm or FedAvg())
    return [record.message for record in caplog.records if "one step in a round" in record.message]


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_single_steps_of_adam_are_told_once(tmp_path, caplog, optimizer):
    (line,) = said(tmp_path, caplog, optimizer, local_epochs=1)
    assert line.startswith(f"model: 1 of 6 clients take one step in a round, each with a new {optimizer.__name__},")
    assert "trainer.local_epochs" in line


def test_a_smaller_number_of_steps_is_counted(tmp_path, caplog):
    (line,) = said(tmp_path, caplog, torch.optim.Adam, local_epochs=None, local_steps=1)
    assert "6 of 6 clients" in line


def test_nothing_is_said_of_sgd(tmp_path, caplog):
    assert said(tmp_path, caplog, torch.optim.SGD, local_epochs=1) == []


def test_nothing_is_said_where_all_take_more_steps(tmp_path, caplog):
    assert said(tmp_path, caplog, torch.optim.Adam, local_epochs=2) == []


def test_nothing_is_said_where_the_pooled_data_train(tmp_path, caplog):
    assert said(tmp_path, caplog, torch.optim.Adam, Centralized(), local_epochs=1, clients_per_round=1.0) == []
