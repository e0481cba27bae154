"""Clients that are evaluated by one mapped step: the numbers that each has by itself, or one after another."""

import logging
from abc import ABC
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from fedbc_lightning.models import MLP, LogisticRegression
from helpers.boring import BoringModel, Hidden, make_trainer, read_csv
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fedbc_lightning import ConfigurationError, FedAvg, FedBC, FederatedDataModule
from fedbc_lightning.algorithms import PerFedBC
from fedbc_lightning.data import ArrayDataset
from fedbc_lightning.engines.recorded import step_recorder
from fedbc_lightning.engines.recorded.step_recorder import StepRecorder
from fedbc_lightning.engines.stacked import stacked_bench
from fedbc_lightning.engines.stacked.stacked_bench import MappedEvaluation
from fedbc_lightning.module.adapter import UserModule

NUM_CLIENTS = 40
NUM_TASKS = 1 + 2 * (NUM_CLIENTS - 1)
NUM_ALONE = NUM_TASKS + 2 * 3
"""In three evaluations: the first time all, then the pooled data, and both models on those of the large client."""
ALONE = []
"""The loaders of clients that were evaluated by themselves."""


@pytest.fixture(autouse=True)
def _watch(monkeypatch):
    evaluate_alone = UserModule.evaluate
    monkeypatch.setattr(
        UserModule, "evaluate", lambda user, loader, stage: ALONE.append(loader) or evaluate_alone(user, loader, stage)
    )


class Data(FederatedDataModule):
    """Client i has 20 training samples and 4 + i % 3 test samples; client 0 has none, the last one 700."""

    num_clients = NUM_CLIENTS

    def __init__(self, **kwargs):
        super().__init__(batch_size=10, **kwargs)
        generator = torch.Generator().manual_seed(0)
        self.sizes = [0, *[4 + i % 3 for i in range(1, NUM_CLIENTS - 1)], 700]
        self.inputs = torch.randn(20 * NUM_CLIENTS, 10, generator=generator)
        self.targets = torch.randint(3, (20 * NUM_CLIENTS,), generator=generator)
        self.whole = TensorDataset(self.inputs, self.targets)

    def client_train_dataset(self, client):
        return Subset(self.whole, range(20 * client, 20 * client + 20))

    def client_test_dataset(self, client):
        if not self.sizes[client]:
            return None
        rows = slice(client, client + self.sizes[client])
        return TensorDataset(self.inputs[rows].clone(), self.targets[rows].clone())


class OfOneTensor(Data):
    """All from one pool, transformed."""

    def client_test_dataset(self, client):
        if not self.sizes[client]:
            return None
        if not hasattr(self, "doubled"):
            self.doubled = ArrayDataset((self.inputs, self.targets), transform=lambda x: 2 * x)
        return self.doubled.subset(torch.arange(self.sizes[client]) + client)


class Model(BoringModel):
    """No buffers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))


class Writing(Model):
    """Writes into its batch."""

    def test_step(self, batch, batch_idx):
        super().test_step([batch[0].mul_(2), batch[1]], batch_idx)


class LogsMore(Model):
    def test_step(self, batch, batch_idx):
        inputs, targets = batch
        losses = functional.cross_entropy(self(inputs), targets, reduction="none")
        self.log("test_size", float(len(targets)))
        self.log("test_total", losses.sum(), reduce_fx="sum")
        self.log("test_largest", losses.max(), reduce_fx=max)
        self.log("test_twice", losses.mean(), batch_size=2 * len(targets))
        self.log_dict({"test_one": torch.tensor(1.0), "test_half": 0.5})
        super().test_step(batch, batch_idx)


class Abstract(Model, ABC):
    """Without a gradient, and of an abstract base."""

    @torch.no_grad()
    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)


class LogsNothing(Model):
    def test_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])


class LogsNumbersAlone(Model):
    def test_step(self, batch, batch_idx):
        self.log("test_one", 1.0)
        self.log("test_largest", 2.0, reduce_fx="max")
        self.log("test_largest", 3, reduce_fx="max")
        self.log("test_number", torch.tensor(3))
        self.log("test_hidden", self(batch[0]).sum(), on_step=False, on_epoch=False)


def evaluate(root, engine="vectorized", model=Model, data=Data, algorithm=FedBC, **options):
    """Rows of ``evaluation.csv``, those of ``metrics.csv``, and how many clients were evaluated by themselves."""
    torch.manual_seed(0)
    ALONE.clear()
    options = {"engine": engine, "name": engine, "clients_per_round": 5, "max_rounds": 2} | options
    trainer = make_trainer(root, **options)
    arguments = {FedBC: {"dual_lr": 0.01}, PerFedBC: {"dual_lr": 0.01}}.get(algorithm, {})
    trainer.fit(model(), data(), algorithm(**arguments))
    folder = Path(trainer.log_dir)
    clients = folder / "evaluation.csv"
    return read_csv(clients) if clients.is_file() else [], read_csv(folder / "metrics.csv"), len(ALONE)


def assert_close(rows, expected):
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            if not name.startswith("time/"):
                assert (value == "") == (other[name] == ""), name
                np.testing.assert_allclose(
                    float(value or 0), float(other[name] or 0), rtol=1e-5, atol=1e-6, err_msg=name
                )


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    return lambda: [text for text in caplog.messages if "evaluated one after another" in text]


def compare(root, model=Model, data=Data, algorithm=FedBC, **options):
    """Both ways with the same numbers; how many clients each evaluated by themselves."""
    ways = [evaluate(root, engine, model, data, algorithm, **options) for engine in ("vectorized", "sequential")]
    for table in (0, 1):
        assert_close(ways[0][table], ways[1][table])
    return ways[0][2], ways[1][2]


@pytest.mark.parametrize(
    ("model", "algorithm", "data"),
    [
        (Model, FedBC, OfOneTensor), (Model, FedAvg, Data), (LogsMore, FedBC, Data), (LogsMore, FedBC, OfOneTensor),
        (Abstract, FedBC, Data), (Writing, FedBC, Data), (LogsNothing, FedBC, Data), (LogsNumbersAlone, FedBC, Data),
        (lambda: LogisticRegression(10, 3), FedBC, Data),
        (lambda: MLP(num_features=10, num_classes=3, dropout=0.0), FedBC, OfOneTensor),
    ],
)  # fmt: skip
def test_the_numbers_of_one_after_another(tmp_path, monkeypatch, said, model, algorithm, data):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    assert compare(tmp_path, model, data, algorithm)[0] == NUM_ALONE
    assert not said()


class Hooked(LogsMore):
    """A hook of rounds changes what its step adds."""

    scale = 1.0

    def test_step(self, batch, batch_idx):
        self.log("test_scale", self.scale * batch[0].mean())
        super().test_step(batch, batch_idx)

    def on_round_start(self):
        self.scale = float(self.trainer.current_round > 3)


class Remembering(Model):
    """Keeps weights of samples for the last length of a batch."""

    kept = None

    def test_step(self, batch, batch_idx):
        if self.kept is None or len(self.kept) != len(batch[0]):
            self.kept = torch.linspace(0.5, 1.0, len(batch[0]))
        self.log("test_loss", (functional.cross_entropy(self(batch[0]), batch[1], reduction="none") * self.kept).mean())


@pytest.mark.parametrize(
    ("model", "is_replayed"), [(LogsMore, {True}), (Hooked, {False}), (Remembering, {True, False})]
)
def test_replayed_evaluations_have_the_bits_of_steps_as_written(tmp_path, monkeypatch, model, is_replayed):
    counts, ready = Counter(), StepRecorder.ready

    def counted(recorder, kind, *given):
        found = ready(recorder, kind, *given)
        counts["replayed" if found is not None else "written"] += kind.endswith("evaluation")
        return found

    monkeypatch.setattr(StepRecorder, "ready", counted)
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    replayed = evaluate(tmp_path, model=model, max_rounds=5)[0]
    assert (counts["replayed"] > 0) in is_replayed
    assert evaluate(tmp_path, model=model, max_rounds=5, record_steps=False)[0] == replayed


class Validates(Model):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))


@pytest.mark.parametrize(
    ("model", "options", "more"),
    [
        (Model, {"eval_batch_size": 30}, {"precision": "64-true"}),  # at most seven clients of four samples at once
        (Validates, {"val_fraction": 0.3}, {}),
    ],
)
def test_validation_data_double_precision_and_small_batches(tmp_path, said, model, options, more):
    mapped, alone = compare(tmp_path, model, lambda: Data(**options), **more)
    assert mapped < 3 * alone / 4
    assert not said()


class Draws(Model):
    def test_step(self, batch, batch_idx):
        self.log("test_noise", torch.rand(()))
        super().test_step(batch, batch_idx)


class HoldsAMetric(Model):
    def __init__(self):
        super().__init__()
        self.metric = MulticlassAccuracy(3)

    def test_step(self, batch, batch_idx):
        self.metric(self(batch[0]), batch[1])
        self.log("test_metric", self.metric)


class UsesAParameterElsewhere(Model):
    def __init__(self):
        super().__init__()
        self.held = [self.net[0].weight]

    def test_step(self, batch, batch_idx):
        self.log("test_norm", self.held[0].norm())


class LooksAtSomeValues(Model):
    """Only where a client has six samples."""

    def test_step(self, batch, batch_idx):
        if len(batch[1]) == 6:
            self.log("test_largest", batch[0].max().item())
        super().test_step(batch, batch_idx)


class IsDoneInTurn(Model):
    """torch knows no way to do this operation for several clients at once, and warns."""

    def test_step(self, batch, batch_idx):
        self.log("test_largest", torch.histc(self(batch[0]), bins=4, min=-1.0, max=1.0).max())


class LogsAtTheEnd(Model):
    def test_step(self, batch, batch_idx):
        self.last = self(batch[0]).abs().mean()
        super().test_step(batch, batch_idx)

    def on_test_epoch_end(self):
        self.log("test_last", self.last)


class WeighsByATensor(Model):
    def test_step(self, batch, batch_idx):
        self.log("test_weighed", self(batch[0]).mean(), batch_size=(batch[1] > 0).sum() + 1)


class Items(Data):
    """Data of a DataLoader; twenty clients, for each DataLoader takes its time."""

    def client_test_dataset(self, client):
        dataset = super().client_test_dataset(client) if client < 20 else None
        return None if dataset is None else Hidden(dataset)


@pytest.mark.parametrize(
    ("model", "data", "reason"),
    [
        (LooksAtSomeValues, Data, ".item()"),
        (Draws, Data, "random operation"),
        (UsesAParameterElsewhere, Data, "gives other numbers"),
        (IsDoneInTurn, Data, "each of them in turn"),
        (HoldsAMetric, Data, "holds a torchmetrics Metric"),
        (LogsAtTheEnd, Data, "the hook on_test_epoch_end is called"),
        (WeighsByATensor, Data, "batch_size that is a tensor"),
        (Model, Items, "not tensors in memory"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_more_than_a_function_is_evaluated_one_after_another(tmp_path, said, model, data, reason):
    mapped, alone = compare(tmp_path, model, data)
    assert mapped == alone
    (line,) = said()
    assert reason in line


@pytest.mark.parametrize("model", [Model, LooksAtSomeValues])
def test_a_resumed_run_has_the_same_digits(tmp_path, model):
    def fit(name, rounds, ckpt_path=None):
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path, engine="vectorized", clients_per_round=5, max_rounds=rounds, name=name)
        trainer.fit(model(), Data(), FedBC(dual_lr=0.01), ckpt_path=ckpt_path)
        return Path(trainer.log_dir, "evaluation.csv").read_text()

    whole = fit("whole", 3)
    fit("parts", 1)
    tables = whole, fit("parts", 3, "last")
    assert tables[0] == tables[1]


def test_hooks_of_batches_see_every_client(tmp_path):
    class Watch(Callback):
        def __init__(self):
            self.sizes = []

        def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            self.sizes.append(len(batch[1]))

    watches = [Watch(), Watch()]
    for engine, watch in zip(("vectorized", "sequential"), watches, strict=True):
        evaluate(tmp_path, engine, callbacks=[watch])
    assert watches[0].sizes == watches[1].sizes


def test_fine_tuned_models_are_evaluated_one_after_another(tmp_path):
    alone, _ = compare(tmp_path, algorithm=PerFedBC)
    assert alone == NUM_TASKS + 2 * (2 + NUM_CLIENTS - 1)  # z by mapped steps


def test_a_mistake_is_told_as_ever(tmp_path):
    class Wrong(Data):
        def client_test_dataset(self, client):
            dataset = super().client_test_dataset(client)
            return None if dataset is None else TensorDataset(dataset.tensors[0], dataset.tensors[1] + 5)

    with pytest.raises(ConfigurationError, match="num_classes"):
        evaluate(tmp_path, model=lambda: LogisticRegression(10, 3), data=Wrong)


@pytest.mark.distributed
def test_two_processes_evaluate_the_same_clients_together(tmp_path):
    one, two = (evaluate(tmp_path / str(n), devices=n, strategy="ddp_fork")[0] for n in (1, 2))
    initial = [[row for row in rows if row["round"] == "0"] for rows in (one, two)]
    assert len(initial[0]) == NUM_CLIENTS - 1
    assert initial[0] == initial[1]
    assert_close(one, two)


def test_own_models_are_stacked_as_far_as_there_is_space(tmp_path, monkeypatch):
    num_models = []
    run = MappedEvaluation.run
    monkeypatch.setattr(
        MappedEvaluation, "run", lambda self, loaders, w: num_models.append(w.shape[:-1]) or run(self, loaders, w)
    )
    row_bytes = 4 * sum(parameter.numel() for parameter in Model().parameters())
    monkeypatch.setattr(stacked_bench, "BYTES_OF_COHORT", 7 * stacked_bench.NUM_MATRICES * row_bytes)
    compare(tmp_path)
    assert set(num_models) == {(), (7,), (6,)}
