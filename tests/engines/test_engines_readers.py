"""What a sceptical reader found in the engines, each as a test: the vectorized one, and clients told late."""

import math

import pytest
import torch
from helpers.boring import BoringData, make_trainer, read_csv
from test_vectorized import Model
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedbc_lightning import ConfigurationError, FedAvg, FedBC
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


class ClampedGradients(Model):
    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.15, 0.15))


class ClampedLate(Model):
    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.15, 0.15))


class Projected(Model):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.1, 0.1) for p in self.parameters()])
        return optimizer


class CountsTheTail(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (1 + batch_idx) if len(batch[0]) < 16 else loss


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ClampedGradients, "hooks on its parameters"),
        (ClampedLate, "hooks on its parameters"),
        (Projected, "hooks on the steps of its optimizer"),
        (CountsTheTail, "another batch_idx"),
    ],
)
def test_what_mapping_would_pass_over_is_refused(tmp_path, model, reason):
    with pytest.raises(ConfigurationError, match=reason):
        fit(tmp_path, model, engine="vectorized")


class LogsTheTail(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        if len(batch[0]) < 16:
            self.log("train_tail", loss.detach())
        return loss


class Unequal(BoringData):
    """Some clients with a last batch that is not full, some without."""

    def client_train_dataset(self, client):
        inputs, targets = super().client_train_dataset(client).tensors
        size = 16 if client % 2 else 21
        return TensorDataset(inputs.repeat(2, 1)[:size], targets.repeat(2)[:size])


def test_a_name_that_only_some_clients_log(tmp_path):
    tables = [[fit(tmp_path, LogsTheTail, data=Unequal, engine=engine)] for engine in ("vectorized", "sequential")]
    for name, column in (("clients", "train_tail"), ("metrics", "train/tail")):
        ours, theirs = ([row.get(column) for row in rows(trainer, name)] for (trainer,) in tables)
        assert [value == "" for value in ours] == [value == "" for value in theirs]
        filled = [(float(a), float(b)) for a, b in zip(ours, theirs, strict=True) if a]
        assert filled
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in filled)


class Noisy(Model):
    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return functional.cross_entropy(self(functional.dropout(inputs, 0.5)), targets)


def test_draws_of_any_kind_are_said_once(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit(tmp_path, Noisy, engine="vectorized")
    assert caplog.text.count("for a whole cohort at once, so its masks depend on who is in it") == 1


# a client that is told nothing because all of its steps are replayed


class ReadsInTest(Model):
    def test_step(self, batch, batch_idx):
        trainer = self.trainer
        for name in (
            "global_step",
            "max_epochs",
            "estimated_stepping_batches",
            "num_training_batches",
            "current_epoch",
        ):
            self.log(f"test_{name}", float(getattr(trainer, name)))
        self.log("test_heard", float(sum(not name.startswith("time/") for name in trainer.callback_metrics)))


def metrics(trainer):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(trainer, "metrics")]


def test_outside_clients_the_module_sees_no_client(tmp_path, monkeypatch):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    options = {
        "eval_every_n_rounds": 1,
        "clients_per_round": 3,
        "max_rounds": 5,
        "local_epochs": 2,
        "record_steps": True,
    }
    recorded = fit(tmp_path, ReadsInTest, **options)
    written = fit(tmp_path, ReadsInTest, **options | {"record_steps": False})
    assert metrics(recorded) == metrics(written)
    assert [row["global_step/global"] for row in metrics(recorded)] == [f"{round}.0" for round in range(6)]
    stopped = fit(tmp_path, ReadsInTest, name="stopped", **{**options, "max_rounds": 3})
    torch.manual_seed(0)
    resumed = make_trainer(tmp_path, name="stopped", precision="64-true", **options)
    resumed.fit(ReadsInTest(), BoringData(), FedAvg(), ckpt_path="last")
    assert resumed.log_dir == stopped.log_dir
    assert metrics(resumed) == metrics(recorded)


class HookReadsTrainer(Model):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()

        def shrink(*_):
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(1 - 0.001 * self.global_step)

        optimizer.register_step_post_hook(shrink)
        return optimizer


def test_hooks_of_the_optimizer_see_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    recorded, written = (
        fit(tmp_path, HookReadsTrainer, local_epochs=2, max_rounds=4, record_steps=record) for record in (True, False)
    )
    assert torch.equal(recorded.server.z, written.server.z)


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


def test_a_term_that_knows_all_clients_only(tmp_path, monkeypatch):
    together = fit(tmp_path, algorithm=Mine)
    assert together.federation.engine.cohort_size > 1
    vectorized = fit(tmp_path, algorithm=Mine, engine="vectorized")
    monkeypatch.setattr("fedbc_lightning.engines.sequential.MAX_COHORT", 1)
    alone = fit(tmp_path, algorithm=Mine)
    assert torch.equal(together.server.z, alone.server.z)
    torch.testing.assert_close(vectorized.server.z, alone.server.z, rtol=1e-12, atol=1e-14)


def test_fedbc_takes_its_terms_apart(tmp_path, monkeypatch):
    together = fit(tmp_path, algorithm=lambda: FedBC(dual_lr=0.1))
    monkeypatch.setattr("fedbc_lightning.engines.sequential.MAX_COHORT", 1)
    alone = fit(tmp_path, algorithm=lambda: FedBC(dual_lr=0.1))
    assert torch.equal(together.server.z, alone.server.z)
