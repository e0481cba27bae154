"""engine: auto: the faster engine on the run's own steps, said, kept, and without a trace in the numbers."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_trainer
from test_vectorized import Branching, Model

from fedbc_lightning import FedAvg, FedBC
from fedbc_lightning.algorithms import L2GD, MOON
from fedbc_lightning.engines import choice
from fedbc_lightning.engines.stacked.vectorized import VectorizedEngine
from fedbc_lightning.engines.trial import Batches, Cost, Trial, Workload
from fedbc_lightning.federation.checkpoint_content import module_state_of, state_of


def fit(root, engine, model=Model, algorithm=FedAvg, ckpt_path=None, **options):
    torch.manual_seed(0)
    trainer = make_trainer(root, engine=engine, eval_every_n_rounds=0, **{"clients_per_round": 5, **options})
    trainer.fit(model(), BoringData(), algorithm(), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture
def timed(monkeypatch):
    """Let ``engine: auto`` time runs however short they are."""
    monkeypatch.setattr(choice, "SECONDS_OF_RECORDING", -1.0)


def prefer(monkeypatch, kind, seconds_of_other=2.0):
    """Let the trial find this engine faster; it still takes its steps."""
    monkeypatch.setattr(choice, "SECONDS_OF_RECORDING", -1.0)
    real, trials = choice.Trial.run, []

    def run(self, shares):
        seconds = real(self, shares)
        assert set(seconds) == {"sequential", "vectorized"}
        assert all(value > 0 for value in seconds.values())
        trials.append(shares)
        return {name: 1.0 if name == kind else seconds_of_other for name in seconds}

    monkeypatch.setattr(choice.Trial, "run", run)
    return trials


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
@pytest.mark.parametrize("algorithm", [FedAvg, lambda: FedBC(dual_lr=0.1)])
def test_the_faster_one_and_nothing_of_the_trial_remains(tmp_path, monkeypatch, caplog, kind, algorithm):
    asked = fit(tmp_path, kind, algorithm=algorithm)
    trials = prefer(monkeypatch, kind)
    with caplog.at_level("INFO"):
        chosen = fit(tmp_path, "auto", algorithm=algorithm)
    assert len(trials) == 1
    assert f"trainer.engine: auto takes {kind}: the 5 clients of a round" in caplog.text
    assert isinstance(chosen.federation.engine, VectorizedEngine) == (kind == "vectorized")
    assert_equal_trees(state_of(chosen.federation), state_of(asked.federation))
    assert_equal_trees(module_state_of(chosen.federation), module_state_of(asked.federation))
    tables = [Path(trainer.log_dir, "clients.csv").read_text() for trainer in (chosen, asked)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_a_resumed_run_keeps_its_choice(tmp_path, monkeypatch, kind):
    trials = prefer(monkeypatch, kind)
    fit(tmp_path, "auto", max_rounds=2)
    monkeypatch.undo()
    trials = prefer(monkeypatch, "vectorized" if kind == "sequential" else "sequential")
    resumed = fit(tmp_path, "auto", max_rounds=4, ckpt_path="last")
    assert resumed.federation.engine_kind == kind
    assert not trials
    whole = fit(tmp_path, kind, max_rounds=4, name="whole")
    assert_equal_trees(state_of(resumed.federation), state_of(whole.federation))


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (BoringModel, {}, "cannot train with buffers that training moves, such as BatchNorm's"),
        (Branching, {}, "Branching.training_step looks at the value of a tensor"),
        (Model, {"algorithm": lambda: L2GD(0.1, 0.5, 0.1), "clients_per_round": 1.0}, "cannot train with L2GD"),
        (Model, {"algorithm": lambda: MOON("net.0")}, "cannot train with MOON"),
        (Model, {"clients_per_round": 1}, "one process trains one client in a round"),
    ],
)
def test_what_cannot_be_mapped_is_trained_one_after_another(timed, tmp_path, caplog, model, options, reason):
    with caplog.at_level("INFO"):
        trainer = fit(tmp_path, "auto", model, **options)
    assert trainer.federation.engine_kind == "sequential"
    assert re.search(rf"auto takes sequential; .*{reason}", caplog.text)
    assert caplog.text.count("auto takes") == 1


def test_an_evaluation_tries_nothing(tmp_path, monkeypatch):
    trials = prefer(monkeypatch, "sequential")
    trainer = fit(tmp_path, "auto")
    assert len(trials) == 1
    trainer.test(Model(), BoringData(), FedAvg(), ckpt_path="last")
    assert len(trials) == 1


@pytest.mark.parametrize(("seconds_of_other", "kind"), [(1.2, "sequential"), (1.3, "vectorized")])
def test_the_vectorized_engine_must_save_a_fifth(tmp_path, monkeypatch, caplog, seconds_of_other, kind):
    prefer(monkeypatch, "vectorized", seconds_of_other)
    with caplog.at_level("INFO"):
        trainer = fit(tmp_path, "auto")
    assert trainer.federation.engine_kind == kind
    assert ("that is not 20% less" in caplog.text) == (kind == "sequential")


def test_a_run_that_is_too_short_is_not_timed(tmp_path, monkeypatch, caplog):
    trials = prefer(monkeypatch, "vectorized")
    monkeypatch.undo()
    with caplog.at_level("INFO"):
        trainer = fit(tmp_path, "auto", max_rounds=2)
    assert not trials
    assert trainer.federation.engine_kind == "sequential"
    assert re.search(r"auto takes sequential; 2 rounds of local training take about \S+ s, and to time", caplog.text)


@pytest.mark.parametrize(
    ("sizes", "full", "odd"),
    [
        ([8, 8], [2, 2, 2, 2], []),
        ([8, 6], [2, 2, 2, 2], [1, 1]),  # the second client's last batch is a step of its own
        ([6, 6], [2, 2], [2, 2]),
        ([8, 4, 3], [3, 3, 1, 1], [1, 1]),
    ],
)
def test_stacks_of_full_and_of_odd_batches(sizes, full, odd):
    """Two epochs in batches of four."""
    sizes = np.array(sizes)
    per_epoch = -(-sizes // 4)
    batches = Batches(2 * per_epoch, per_epoch, sizes % 4)
    found = [part.tolist() for part in batches.stacks()]
    assert found == [full, odd]
    assert batches.num_odd.tolist() == [2 * (size % 4 > 0) for size in sizes.tolist()]


def test_odd_batches_cost_what_steps_as_written_cost(tmp_path):
    trainer = fit(tmp_path, "vectorized")
    trial = Trial(trainer.federation.engine)
    trial._one, trial._two, trial._many = Cost(0.0, 1.0), Cost(0.0, 2.0), Cost(0.0, 5.0)
    trial._num_many, trial._written = 5, Cost(0.0, 100.0)
    sizes, batch_size = trainer.federation.datamodule.num_samples("train"), trainer.federation.datamodule.batch_size
    ids = list(range(len(sizes)))
    steps = trainer.federation.datamodule.num_batches()
    num_odd = int((sizes % batch_size > 0).sum())
    assert num_odd > 0
    found = trial.predict(Workload(ids, steps.tolist()))
    assert found["sequential"] == steps.sum() - num_odd + 100.0 * num_odd
    assert 100.0 * num_odd < found["vectorized"] <= 100.0 * num_odd + 5.0 * steps.max()
