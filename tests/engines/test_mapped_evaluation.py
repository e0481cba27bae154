"""Clients that are evaluated by one mapped step: the numbers that each has by itself, or one after another."""

import logging
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from fedbc_lightning.models import MLP, LogisticRegression
from helpers.boring import BoringModel, Hidden, make_trainer, read_csv
from helpers.command_line import run_cli
from helpers.programs import run_python
from helpers.scripts import ROOT
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fedbc_lightning import ConfigurationError, FedAvg, FedBC, FederatedDataModule
from fedbc_lightning.algorithms import PerFedBC
from fedbc_lightning.data import ArrayDataset
from fedbc_lightning.engines.stacked import stacked_bench
from fedbc_lightning.engines.stacked.mapped_evaluation import MappedEvaluation
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


class AbstractModel(ABC, Model):
    @abstractmethod
    def anything(self): ...


class Abstract(AbstractModel):
    """Without a gradient, and of an abstract base."""

    def anything(self):
        return None

    @torch.no_grad()
    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)


def evaluate(root, engine="vectorized", model=Model, data=Data, algorithm=FedBC, **options):
    """Rows of ``evaluation.csv``, those of ``metrics.csv``, and how many clients were evaluated by themselves."""
    torch.manual_seed(0)
    ALONE.clear()
    trainer = make_trainer(root, engine=engine, name=engine, clients_per_round=5, max_rounds=2, **options)
    arguments = {FedBC: {"dual_lr": 0.01}, PerFedBC: {"dual_lr": 0.01}}.get(algorithm, {})
    trainer.fit(model(), data(), algorithm(**arguments))
    folder = Path(trainer.log_dir)
    clients = folder / "evaluation.csv"
    return read_csv(clients) if clients.is_file() else [], read_csv(folder / "metrics.csv"), len(ALONE)


def assert_close(rows, expected):
    assert len(rows) == len(expected) > 0
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


@pytest.mark.parametrize("data", [Data, OfOneTensor])
@pytest.mark.parametrize(
    ("model", "algorithm"), [(Model, FedBC), (Model, FedAvg), (LogsMore, FedBC), (Abstract, FedBC)]
)
def test_the_numbers_of_one_after_another(tmp_path, said, model, algorithm, data):
    rows, metrics, calls = evaluate(tmp_path, model=model, data=data, algorithm=algorithm)
    expected = evaluate(tmp_path, "sequential", model=model, data=data, algorithm=algorithm)
    assert_close(rows, expected[0])
    assert_close(metrics, expected[1])
    assert not said()
    assert calls == NUM_ALONE
    assert {row["client"] for row in rows} == {str(client) for client in range(1, NUM_CLIENTS)}


@pytest.mark.parametrize(
    "model",
    [lambda: LogisticRegression(10, 3), lambda: MLP(num_features=10, num_classes=3, dropout=0.0)],
    ids=["logistic", "MLP"],
)
def test_models_of_this_package_are_mapped(tmp_path, said, model):
    results = [evaluate(tmp_path, engine, model=model) for engine in ("vectorized", "sequential")]
    assert_close(results[0][0], results[1][0])
    assert results[0][2] == NUM_ALONE
    assert not said()


def test_double_precision_and_small_evaluation_batches(tmp_path):
    class Small(Data):
        def __init__(self):
            super().__init__(eval_batch_size=30)  # at most seven clients of four samples at once

    results = [evaluate(tmp_path, e, data=Small, precision="64-true") for e in ("vectorized", "sequential")]
    for rows, expected in zip(results[0][:2], results[1][:2], strict=True):
        assert_close(rows, expected)
    assert results[0][2] < results[1][2]


class LooksAtValues(Model):
    def test_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.log("test_share", (outputs.argmax(1) == batch[1]).float().mean().item())
        super().test_step(batch, batch_idx)


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


class LooksAtMemory(Model):
    """What it gives depends on more than the numbers of a batch."""

    def test_step(self, batch, batch_idx):
        self.log("test_size_of_storage", float(batch[0].untyped_storage().nbytes()))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (LooksAtValues, ".item()"),
        (LooksAtSomeValues, ".item()"),
        (Draws, "random operation"),
        (UsesAParameterElsewhere, "gives other numbers"),
        (IsDoneInTurn, "each of them in turn"),
        (HoldsAMetric, "holds a torchmetrics Metric"),
        (LogsAtTheEnd, "the hook on_test_epoch_end is called"),
        (WeighsByATensor, "batch_size that is a tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_more_than_a_function_is_evaluated_one_after_another(tmp_path, said, model, reason):
    rows, metrics, calls = evaluate(tmp_path, model=model)
    expected = evaluate(tmp_path, "sequential", model=model)
    assert_close(rows, expected[0])
    assert_close(metrics, expected[1])
    assert calls == expected[2]
    assert len(said()) == 1
    assert reason in said()[0]


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


@pytest.mark.parametrize("model", [LogsNothing, LogsNumbersAlone])
def test_what_little_is_logged(tmp_path, said, model):
    _, metrics, calls = evaluate(tmp_path, model=model)
    assert calls == NUM_ALONE
    assert_close(metrics, evaluate(tmp_path, "sequential", model=model)[1])
    assert not said()


class Validates(Model):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))


def test_validation_data_too(tmp_path, said):
    class Both(Data):
        def __init__(self):
            super().__init__(val_fraction=0.3)

    rows, metrics, calls = evaluate(tmp_path, model=Validates, data=Both)
    expected = evaluate(tmp_path, "sequential", model=Validates, data=Both)
    assert_close(rows, expected[0])
    assert_close(metrics, expected[1])
    assert "loss/val_local" in rows[0]
    assert calls < expected[2] / 2
    assert not said()


@pytest.mark.parametrize("model", [Model, LooksAtSomeValues])
def test_a_resumed_run_has_the_same_digits(tmp_path, model):
    torch.manual_seed(0)
    options = {"engine": "vectorized", "clients_per_round": 5, "name": "run"}
    whole = make_trainer(tmp_path / "whole", max_rounds=4, **options)
    whole.fit(model(), Data(), FedBC(dual_lr=0.01))
    torch.manual_seed(0)
    parts = [make_trainer(tmp_path / "parts", max_rounds=rounds, **options) for rounds in (2, 4)]
    parts[0].fit(model(), Data(), FedBC(dual_lr=0.01))
    parts[1].fit(model(), Data(), FedBC(dual_lr=0.01), ckpt_path="last")
    tables = [Path(trainer.log_dir, "evaluation.csv").read_text() for trainer in (whole, parts[1])]
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


def test_data_of_a_dataloader_are_evaluated_one_after_another(tmp_path, said):
    class Items(Data):
        def client_test_dataset(self, client):
            dataset = super().client_test_dataset(client) if client < 20 else None  # each DataLoader takes its time
            return None if dataset is None else Hidden(dataset)

    results = [evaluate(tmp_path, engine, data=Items) for engine in ("vectorized", "sequential")]
    assert_close(results[0][0], results[1][0])
    assert results[0][2] == results[1][2]
    assert "not tensors in memory" in said()[0]


def test_fine_tuned_models_are_evaluated_one_after_another(tmp_path):
    results = [evaluate(tmp_path, engine, algorithm=PerFedBC) for engine in ("vectorized", "sequential")]
    assert_close(results[0][0], results[1][0])
    assert results[0][2] == NUM_TASKS + 2 * (2 + NUM_CLIENTS - 1)  # z by mapped steps


def test_a_mistake_is_told_as_ever(tmp_path):
    class Wrong(Data):
        def client_test_dataset(self, client):
            dataset = super().client_test_dataset(client)
            return None if dataset is None else TensorDataset(dataset.tensors[0], dataset.tensors[1] + 5)

    with pytest.raises(ConfigurationError, match="num_classes"):
        evaluate(tmp_path, model=lambda: LogisticRegression(10, 3), data=Wrong)


def test_numbers_that_differ_when_mapped_are_not_used(tmp_path, said):
    rows, _, _ = evaluate(tmp_path, model=LooksAtMemory)
    expected = evaluate(tmp_path, "sequential", model=LooksAtMemory)
    assert_close(rows, expected[0])
    assert len(said()) == 1


def test_two_processes_evaluate_the_same_clients_together(tmp_path):
    def words(devices):
        return [
            "fit", "--config", ROOT / "configs/digits.yaml", "--trainer.engine", "vectorized",
            "--data.partitioner", "IID", "--data.partitioner.num_clients", 60, "--trainer.devices", devices,
            "--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.max_rounds", 1,
            "--trainer.default_root_dir", tmp_path / str(devices),
        ]  # fmt: skip

    assert run_cli(*words(1)) == 0
    done = run_python(["-m", "fedbc_lightning", *words(2)], tmp_path)
    assert done.returncode == 0, done.stderr
    found = [read_csv(tmp_path / devices / "digits" / "FedBC-0" / "evaluation.csv") for devices in ("1", "2")]
    of_the_initial_model = [[row for row in rows if row["round"] == "0"] for rows in found]
    assert len(of_the_initial_model[0]) == 60
    assert of_the_initial_model[0] == of_the_initial_model[1]
    assert_close(found[0], found[1])


def test_own_models_are_stacked_as_far_as_there_is_space(tmp_path, monkeypatch):
    num_models = []
    run = MappedEvaluation.run
    monkeypatch.setattr(
        MappedEvaluation, "run", lambda self, loaders, w: num_models.append(w.shape[:-1]) or run(self, loaders, w)
    )
    row_bytes = 4 * sum(parameter.numel() for parameter in Model().parameters())
    monkeypatch.setattr(stacked_bench, "BYTES_OF_ROWS", 7 * stacked_bench.NUM_MATRICES * row_bytes)
    rows = evaluate(tmp_path)[0]
    assert_close(rows, evaluate(tmp_path, "sequential")[0])
    assert set(num_models) == {(), (7,), (6,)}


def test_z_and_own_models_see_the_same_batch_even_if_the_step_writes_into_it(tmp_path):
    rows, _, num_alone = evaluate(tmp_path, model=Writing)
    assert num_alone == NUM_ALONE
    assert_close(rows, evaluate(tmp_path, "sequential", Writing)[0])
