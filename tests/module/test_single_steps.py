"""Adam that gets nowhere is told of, for each round gives a client a new one: single steps, and few small ones."""

import pytest
import torch
from helpers.boring import BoringData, make_model, make_trainer

from fedbc_lightning import FedAvg
from fedbc_lightning.algorithms import Centralized


def said(tmp_path, caplog, optimizer, algorithm=None, lr=0.01, words="one step in a round", **settings):
    model = make_model()
    model.configure_optimizers = lambda: optimizer(model.parameters(), lr)
    make_trainer(tmp_path, **settings).fit(model, BoringData(), algorithm or FedAvg())
    return [record.message for record in caplog.records if words in record.message]


FEW = {"lr": 0.001, "words": "move it by", "local_epochs": None, "local_steps": 5, "max_rounds": 10}


def test_a_run_of_few_small_steps_of_adam_is_told_what_to_choose(tmp_path, caplog):
    (line,) = said(tmp_path, caplog, torch.optim.AdamW, **FEW)
    assert "10 rounds of at most 5 steps with 0.001 move it by 0.05 at most" in line
    assert "a learning rate of 0.01, more trainer.local_epochs, or a smaller data.batch_size" in line


@pytest.mark.parametrize("other", [{"lr": 0.01}, {"local_steps": 20}, {"max_rounds": 3}, {"local_steps": 1}])
def test_a_run_that_can_learn_or_is_a_trial_is_not(tmp_path, caplog, other):
    assert said(tmp_path, caplog, torch.optim.Adam, **FEW | other) == []


def test_few_small_steps_of_sgd_are_the_users_own_choice(tmp_path, caplog):
    assert said(tmp_path, caplog, torch.optim.SGD, **FEW) == []


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
