"""What a sceptical reader found in the engines, each as a test: the vectorized one, and clients told late."""

import pytest
import torch
from helpers.boring import BoringData, make_trainer, read_csv
from test_vectorized import Model

from fedbc_lightning import FedAvg, FedBC
from fedbc_lightning.algorithms import Ditto
from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.engines.recorded import step_recorder
from fedbc_lightning.server import WeightedAverage


def fit(root, model=Model, algorithm=FedAvg, data=BoringData, **options):
    torch.manual_seed(0)
    defaults = {"clients_per_round": 6, "eval_every_n_rounds": 0, "precision": "64-true", "max_rounds": 2}
    trainer = make_trainer(root, **{**defaults, **options})
    trainer.fit(model(), data(), algorithm())
    return trainer


def rows(trainer, name):
    return read_csv(f"{trainer.log_dir}/{name}.csv")


# the vectorized engine


def test_personal_epochs_beside_local_steps(tmp_path):
    trained = [
        fit(tmp_path, algorithm=lambda: Ditto(0.1, personal_epochs=1), local_steps=4, engine=engine)
        for engine in ("vectorized", "sequential")
    ]
    for client in range(6):
        ours, theirs = (trainer.clients.vector("local_model", client) for trainer in trained)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


# a client that is told nothing because all of its steps are replayed


class ReadsInTest(Model):
    def test_step(self, batch, batch_idx):
        trainer = self.trainer
        planned = ("estimated_stepping_batches", "num_training_batches")
        for name in ("global_step", "max_epochs", "current_epoch", *planned):
            self.log(f"test_{name}", float(getattr(trainer, name)))
        self.log("test_heard", float(sum(not name.startswith("time/") for name in trainer.callback_metrics)))


def metrics(trainer):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(trainer, "metrics")]


def test_outside_clients_the_module_sees_no_client(tmp_path, monkeypatch):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    options = {
        "eval_every_n_rounds": 1, "clients_per_round": 3, "max_rounds": 3, "local_epochs": 2, "record_steps": True,
    }  # fmt: skip
    recorded = fit(tmp_path, ReadsInTest, **options)
    written = fit(tmp_path, ReadsInTest, **options | {"record_steps": False})
    assert metrics(recorded) == metrics(written)
    assert [row["global_step/global"] for row in metrics(recorded)] == [f"{round}.0" for round in range(4)]
    stopped = fit(tmp_path, ReadsInTest, name="stopped", **{**options, "max_rounds": 2})
    torch.manual_seed(0)
    resumed = make_trainer(tmp_path, name="stopped", precision="64-true", **options)
    resumed.fit(ReadsInTest(), BoringData(), FedAvg(), ckpt_path="last")
    assert resumed.log_dir == stopped.log_dir
    assert metrics(resumed) == metrics(recorded)


# methods of a user's own


class Pull:
    """A term that knows all K clients at once, and no client alone."""

    is_zero = False

    def __init__(self, strengths):
        self.strengths = strengths[:, None]

    def add_gradient(self, grad, w):
        grad += self.strengths * w

    def value(self, w):
        return (self.strengths * w.square() / 2).sum(dim=1)


class Shrink:
    def __init__(self, factors):
        self.factors = factors[:, None]

    def apply(self, w, step_size):
        w *= self.factors


class Mine(FederatedAlgorithm):
    def client_update(self, engine, cohort, server):
        strengths = torch.tensor([0.1 * (client + 1) for client in cohort.ids], dtype=torch.float64)
        engine.solve(cohort, server.model, terms=[Pull(strengths)], after_step=Shrink(1 - strengths / 100))

    def server_callbacks(self, engine):
        return [WeightedAverage()]


@pytest.mark.parametrize("algorithm", [Mine, lambda: FedBC(dual_lr=0.1)])
def test_terms_of_a_cohort_are_taken_apart(tmp_path, monkeypatch, algorithm):
    """Also terms that know all clients only."""
    together = fit(tmp_path, algorithm=algorithm)
    assert together.federation.engine.cohort_size > 1
    vectorized = fit(tmp_path, algorithm=algorithm, engine="vectorized")
    monkeypatch.setattr("fedbc_lightning.engines.sequential.MAX_COHORT", 1)
    alone = fit(tmp_path, algorithm=algorithm)
    assert torch.equal(together.server.z, alone.server.z)
    torch.testing.assert_close(vectorized.server.z, alone.server.z, rtol=1e-12, atol=1e-14)
