"""Results of clients' own models that are kept: the numbers of a run that evaluates all, with fewer evaluations."""

import numpy as np
import pytest
import torch
from helpers.boring import BoringModel, make_trainer
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fedbc_lightning import FedAvg, FedBC, FederatedDataModule
from fedbc_lightning.algorithms import APFL, PerFedBC
from fedbc_lightning.data import ArrayDataset
from fedbc_lightning.evaluation import kept_results
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.evaluation.kept_results import KeptResults
from fedbc_lightning.module.adapter import UserModule

NUM_CLIENTS, NUM_ROUNDS, NUM_SAMPLED = 6, 6, 2
NUM_ALL = (1 + NUM_ROUNDS) * (1 + 2 * NUM_CLIENTS)
"""Evaluations of all rounds: of the pooled data, and of both models of each client."""


class Data(FederatedDataModule):
    """Client i has 20 training samples and 5 test samples, but the last one two batches of them."""

    num_clients, last_size = NUM_CLIENTS, 13

    def __init__(self):
        super().__init__(batch_size=10, eval_batch_size=8)
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_CLIENTS, 20, 10, generator=generator)
        self.targets = torch.randint(3, (NUM_CLIENTS, 20), generator=generator)
        self.tests = [
            (torch.randn(size, 10, generator=generator), torch.randint(3, (size,), generator=generator))
            for size in (5,) * (NUM_CLIENTS - 1) + (self.last_size,)
        ]

    def client_train_dataset(self, client):
        return TensorDataset(self.inputs[client], self.targets[client])

    def client_test_dataset(self, client):
        return TensorDataset(*self.tests[client])


class OfOneSize(Data):
    last_size = 5


class Transformed(Data):
    def client_test_dataset(self, client):
        return ArrayDataset(self.tests[client], transform=lambda inputs: 2 * inputs)


class Model(BoringModel):
    """No buffers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))
        self.scale, self.shift = 1.0, torch.zeros(1)

    def forward(self, inputs):
        return self.scale * self.net(inputs) + self.shift


class Drawing(Model):
    def forward(self, inputs):
        return super().forward(inputs) + torch.rand(len(inputs), 1)


class Counting(Model):
    def test_step(self, batch, batch_idx):
        self.scale += 0.001
        super().test_step(batch, batch_idx)


class WithMetric(Model):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)


class WithHook(Model):
    def on_test_batch_end(self, outputs, batch, batch_idx):
        pass


class LargeImpure(Model):
    """The step keeps state where batches are large, which those of the pooled data alone are."""

    def test_step(self, batch, batch_idx):
        if len(batch[0]) > 6:
            self.scale += 0.001
        super().test_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def _early(monkeypatch):
    monkeypatch.setattr(kept_results, "PROVE_AFTER", 1)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that makes a run, and returns what each evaluation gave, and the number of evaluations of a model."""
    made, found, keepers = [], [], []
    evaluate, whole, init = UserModule.evaluate, Evaluator.run, KeptResults.__init__

    def watched(evaluator, *args, **kwargs):
        result = whole(evaluator, *args, **kwargs)
        found.append((result.rows(), {name: value for name, value in result.metrics.items() if "time/" not in name}))
        return result

    monkeypatch.setattr(UserModule, "evaluate", lambda *args: made.append(args) or evaluate(*args))
    monkeypatch.setattr(Evaluator, "run", watched)
    monkeypatch.setattr(KeptResults, "__init__", lambda self, *args: keepers.append(self) or init(self, *args))

    def once(model=Model, algorithm=None, data=Data, *, name="kept", callbacks=(), ckpt_path=None, **options):
        made.clear()
        found.clear()
        keepers.clear()
        torch.manual_seed(0)
        options = {"clients_per_round": NUM_SAMPLED, "max_rounds": NUM_ROUNDS, "engine": "sequential"} | options
        trainer = make_trainer(tmp_path, name=name, callbacks=[make() for make in callbacks], **options)
        trainer.fit(model(), data(), algorithm or FedBC(dual_lr=0.01), ckpt_path=ckpt_path)
        return list(found), len(made), [keeper.reason for keeper in keepers], trainer

    return once


@pytest.fixture
def as_written(run, monkeypatch):
    """A function that makes the same run without kept results."""

    def once(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(KeptResults, "result", lambda *args: None)
            return run(*args, name="written", **options)

    return once


@pytest.mark.parametrize("algorithm", [FedAvg(), FedBC(dual_lr=0.01)])
def test_models_that_did_not_train_are_not_evaluated_again(run, as_written, algorithm):
    found, num_made, reasons, _ = run(algorithm=algorithm)
    expected, num_all, _, _ = as_written(algorithm=algorithm)
    assert found == expected
    assert num_all == NUM_ALL
    assert num_made < NUM_ALL - (NUM_ROUNDS - 2) * (NUM_CLIENTS - NUM_SAMPLED) + NUM_CLIENTS
    assert reasons == [None]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"algorithm": APFL()}, None),
        ({"algorithm": PerFedBC(dual_lr=0.01)}, None),
        ({"data": Transformed}, None),
        ({"model": BoringModel}, None),
        ({"record_steps": False}, "record_steps is false"),
        ({"model": Drawing}, "draws random numbers"),
        ({"model": Counting}, "scale"),
        ({"model": WithMetric}, "Metric"),
        ({"model": WithHook}, "on_test_batch_end"),
    ],
    ids=["APFL", "Per-FedBC", "transform", "loaders", "BatchNorm", "not recorded", "draws", "counts", "metric", "hook"],
)
def test_everything_else_is_evaluated_as_written(run, as_written, options, reason):
    """BoringModel counts batches in BatchNorm, and its counters are those of z."""
    found, num_made, reasons, _ = run(**options)
    assert num_made == NUM_ALL
    assert reasons[0] is None if reason is None else reason in reasons[0]
    assert found == as_written(**options)[0]


def test_local_buffers_belong_to_the_rows(run, as_written):
    found, num_made, *_ = run(BoringModel, buffers="local")
    assert found == as_written(BoringModel, buffers="local")[0]
    assert num_made < NUM_ALL


class InRound(Callback):
    """Changes something after round 3."""

    def on_round_end(self, trainer, pl_module):
        if trainer.current_round == 3:
            self.change(trainer.datamodule, pl_module)


class Data1(InRound):
    def change(self, data, model):
        for inputs, _ in data.tests:
            inputs.mul_(2)


class Data2(InRound):
    def change(self, data, model):
        for _, targets in data.tests:
            targets.numpy()[:2] = targets.numpy()[[1, 0]] + 1
            targets.numpy()[:] %= 3


class Attribute(InRound):
    def change(self, data, model):
        model.scale = 2.0


class Values(InRound):
    def change(self, data, model):
        model.shift.data[0] = torch.tensor(0.5)


class Function(InRound):
    def change(self, data, model):
        model.forward = lambda inputs: 3 * model.net(inputs)


@pytest.mark.parametrize("change", [Data1, Data2, Attribute, Values, Function])
def test_changes_between_rounds_are_seen(run, as_written, change):
    found, num_made, *_ = run(callbacks=[change])
    unchanged = run()
    assert found == as_written(callbacks=[change])[0] != unchanged[0]
    assert num_made > unchanged[1]


def test_a_step_that_is_not_proven_for_all_batches_may_change_what_others_read(run, as_written):
    found, _, reasons, _ = run(LargeImpure, data=OfOneSize)
    assert found == as_written(LargeImpure, data=OfOneSize)[0]
    assert reasons == ["what it reads changes"]


def test_settings_of_torch_are_seen(run, monkeypatch):
    """Bits of results depend on the number of threads."""

    class Precision(InRound):
        def change(self, data, model):
            monkeypatch.setattr(kept_results, "numeric_settings", lambda: ("others",))

    assert run(callbacks=[Precision])[1] > run()[1]


def test_what_changes_again_and_again_ends_the_proofs(run):
    class Restless(Callback):
        def on_round_end(self, trainer, pl_module):
            pl_module.scale += 0.1

    assert run(callbacks=[Restless], max_rounds=12)[2] == ["what it reads changes"]


def test_hooks_draw_what_they_would_draw(run, as_written):
    class Draw(Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.log("drawn", torch.rand(()) + np.random.rand())

    name = "drawn"
    trainers = [way(callbacks=[Draw])[3] for way in (run, as_written)]
    assert trainers[0].callback_metrics[name] == trainers[1].callback_metrics[name]


def test_a_resumed_run_has_the_same_numbers(run):
    whole = run(name="whole")
    first = run(name="first", max_rounds=3)
    rest = run(name="rest", ckpt_path=f"{first[3].log_dir}/checkpoints/last.ckpt")
    assert first[0] + rest[0] == whole[0]
    assert first[1] + rest[1] > whole[1]


def test_tensors_outside_of_the_model_are_compared_up_to_a_size(run, monkeypatch):
    monkeypatch.setattr(kept_results, "MAX_OUTSIDE", 3)
    assert "large tensors" in run()[2][0]


def test_no_more_results_are_kept_than_allowed(run, as_written, monkeypatch):
    monkeypatch.setattr(kept_results, "MAX_KEPT", 2)
    found, num_made, *_ = run()
    assert found == as_written()[0]
    assert NUM_ALL - 2 * NUM_ROUNDS <= num_made < NUM_ALL


def test_whether_there_is_a_split_is_asked_once(run, monkeypatch):
    asked = []
    pooled = FederatedDataModule.pooled_dataset
    monkeypatch.setattr(
        FederatedDataModule, "pooled_dataset", lambda data, split: asked.append(split) or pooled(data, split)
    )
    run()
    assert asked.count("val") == 1
