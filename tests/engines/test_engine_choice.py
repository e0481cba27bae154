"""engine: auto: a rule of the settings, said in a line, and kept when a run is resumed."""

import pytest
import torch
from fedbc_lightning.models import MLP, LogisticRegression
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_trainer

from fedbc_lightning import ConfigurationError, FedAvg, FedBC, PoissonSampler, recordable
from fedbc_lightning.algorithms import L2GD, MOON, Centralized, QFedAvg
from fedbc_lightning.engines import choice
from fedbc_lightning.federation.checkpoint_content import state_of


def small():
    return LogisticRegression(10, 3)


class TwoRates(LogisticRegression):
    def __init__(self):
        super().__init__(10, 3)

    training_step = recordable(LogisticRegression.training_step)  # a class with an __init__ promises anew

    def configure_optimizers(self):
        return torch.optim.SGD([{"params": [p], "lr": 0.1 * k} for k, p in enumerate(self.parameters(), 1)])


class Branching(LogisticRegression):
    @recordable
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 0 else 2 * loss


class Noisy(LogisticRegression):
    @recordable
    def training_step(self, batch, batch_idx):
        return super().training_step([torch.nn.functional.dropout(batch[0], 0.1), batch[1]], batch_idx)


def fit(root, engine, model=small, algorithm=FedAvg, ckpt_path=None, **options):
    torch.manual_seed(0)
    trainer = make_trainer(root, engine=engine, eval_every_n_rounds=0, **{"clients_per_round": 5, **options})
    trainer.fit(model(), BoringData(), algorithm(), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture
def few(monkeypatch):
    """Let five clients be many."""
    monkeypatch.setitem(choice.PAYS, "cpu", (5, 2_000))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("algorithm", [FedAvg, lambda: FedBC(dual_lr=0.1)])
def test_small_models_on_many_clients_are_mapped(tmp_path, caplog, algorithm):
    with caplog.at_level("INFO"):
        chosen = fit(tmp_path, "auto", algorithm=algorithm)
    assert chosen.federation.engine_kind == "vectorized"
    assert caplog.text.count("trainer.engine: auto takes vectorized") == 1
    assert_equal_trees(
        state_of(chosen.federation), state_of(fit(tmp_path, "vectorized", algorithm=algorithm).federation)
    )


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (small, {"clients_per_round": 4}, "at least 5 clients per process and round"),
        (lambda: MLP(num_features=10, hidden=200, num_classes=3), {}, "at most 2,000 parameters"),
        (lambda: MLP(num_features=10, hidden=9, num_classes=3, dropout=0.5), {}, "draws random numbers"),
        (lambda: Noisy(10, 3), {}, "draws random numbers"),
        (lambda: Branching(10, 3), {}, "cannot take training_step on a first batch"),
        (small, {"sampler": PoissonSampler(), "clients_per_round": 4}, "and here are 33 and 4"),
        (BoringModel, {}, "training_step is not promised to be a function"),
        (BoringModel, {"record_steps": True, "precision": "bf16-true"}, "cannot train with precision other than"),
        (small, {"algorithm": lambda: L2GD(0.1, 0.5, 0.1), "clients_per_round": 1.0}, "cannot train with L2GD"),
        (small, {"algorithm": lambda: MOON("network")}, "cannot train with MOON"),
        (small, {"algorithm": Centralized}, "there is one model"),
    ],
)
def test_all_others_are_trained_one_after_another(tmp_path, caplog, model, options, reason):
    with caplog.at_level("INFO"):
        trainer = fit(tmp_path, "auto", model, **options)
    assert trainer.federation.engine_kind == "sequential"
    (line,) = [text for text in caplog.messages if "auto takes" in text]
    assert reason in line


def test_a_kind_of_device_that_was_not_measured_is_named(tmp_path, caplog, monkeypatch):
    monkeypatch.delitem(choice.PAYS, "cpu")
    with caplog.at_level("INFO"):
        assert fit(tmp_path, "auto").federation.engine_kind == "sequential"
    assert "alone, not on cpu; choose it by its name" in caplog.text


def test_a_resumed_run_keeps_its_choice(tmp_path, monkeypatch):
    fit(tmp_path, "auto", max_rounds=2)
    monkeypatch.setitem(choice.PAYS, "cpu", (5, 2_000))
    resumed = fit(tmp_path, "auto", max_rounds=4, ckpt_path="last")
    assert resumed.federation.engine_kind == "sequential"
    whole = fit(tmp_path, "sequential", max_rounds=4, name="whole")
    assert_equal_trees(state_of(resumed.federation), state_of(whole.federation))


@pytest.mark.usefixtures("few")
def test_a_mistake_is_told_as_one_not_as_a_choice(tmp_path, caplog):
    with caplog.at_level("INFO"), pytest.raises(ConfigurationError, match=r"lipschitz"):
        fit(tmp_path, "auto", TwoRates, QFedAvg)
    assert "auto takes" not in caplog.text
