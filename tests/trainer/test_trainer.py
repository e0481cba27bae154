"""What a run does and leaves behind."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_model, make_trainer, read_csv
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelSummary, Timer
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader

from fedbc_lightning import FedAvg, FedBC
from fedbc_lightning.callbacks import RoundCheckpoint


class Recorder(Callback):
    """Writes down every hook of rounds and clients."""

    def __init__(self):
        self.events = []

    def on_round_start(self, trainer, pl_module):
        self.events.append(("round_start", trainer.current_round))

    def on_client_start(self, trainer, pl_module, client):
        self.events.append(("client_start", client))

    def on_client_end(self, trainer, pl_module, client):
        self.events.append(("client_end", client))

    def on_round_end(self, trainer, pl_module):
        self.events.append(("round_end", trainer.current_round))


def fit(root, algorithm=None, model=None, data=None, **kwargs):
    trainer = make_trainer(root, **kwargs)
    model = model or make_model()
    trainer.fit(model, data or BoringData(), algorithm or FedAvg())
    return trainer, model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three rounds of FedBC beside callbacks of Lightning's, and what the hooks were called with."""
    model, data, recorder = make_model(), BoringData(), Recorder()
    callbacks = [recorder, Timer(duration="00:01:00:00"), ModelSummary()]
    trainer = make_trainer(tmp_path_factory.mktemp("run"), name="here", callbacks=callbacks)
    trainer.fit(model, data, FedBC(dual_lr=0.01))
    tables = {name: read_csv(f"{trainer.log_dir}/{name}.csv") for name in ("metrics", "clients", "evaluation")}
    return SimpleNamespace(trainer=trainer, model=model, data=data, hooks=recorder.events, **tables)


def test_the_tables_of_a_run(run):
    folder = Path(run.trainer.log_dir)
    assert folder == Path(run.trainer.default_root_dir, "here", "FedBC-1")
    assert [row["round"] for row in run.metrics] == ["0", "1", "2", "3"]
    assert run.metrics[0]["train/loss"] == ""
    expected = (
        "round train/loss accuracy/global loss/global accuracy/local accuracy/local_weighted "
        "accuracy/std accuracy/worst10 num_clients/evaluated comm/bytes_up comm/bytes_down "
        "time/round_seconds time/eval_seconds dual/min dual/max dual/effective_number"
    )
    assert set(expected.split()) <= set(run.metrics[1])
    assert len(run.clients) == 9
    names = "round client num_samples num_steps status train_loss weight dual tolerance distance"
    assert set(names.split()) <= set(run.clients[0])
    for t in ("1", "2", "3"):
        assert sum(float(row["weight"]) for row in run.clients if row["round"] == t) == pytest.approx(1)
    sizes = {str(i): math.ceil(0.8 * (20 + 30 * i)) for i in range(6)}
    assert all(int(row["num_samples"]) == sizes[row["client"]] for row in run.clients)
    assert all(float(row["num_steps"]) == math.ceil(int(row["num_samples"]) / 16) for row in run.clients)
    kinds = [kind for kind, _ in run.hooks]
    assert kinds == (["round_start"] + ["client_start", "client_end"] * 3 + ["round_end"]) * 3
    assert [value for kind, value in run.hooks if kind == "round_start"] == [1, 2, 3]


def test_weights_distance_dual_and_bytes_of_one_round(tmp_path):
    """The module holds a client's weights inside the client, and z outside."""
    seen = []

    class Watch(Callback):
        def on_client_start(self, trainer, pl_module, client):
            seen.append(trainer.layout.read())

        def on_round_end(self, trainer, pl_module):
            assert torch.equal(trainer.layout.read(), trainer.server.z)

    trainer, model = fit(tmp_path, FedBC(dual_lr=0.01), callbacks=Watch(), max_rounds=1)
    d, b = trainer.layout.num_parameters, trainer.layout.num_buffers
    assert (d, b) == (10 * 8 + 8 + 16 + 8 * 3 + 3, 16)
    initial = trainer.layout.vector_from(dict(make_model().named_parameters()))
    assert all(torch.equal(weights, initial) for weights in seen)
    assert torch.equal(trainer.layout.read(), trainer.server.z)
    assert model._trainer is None
    assert "log" not in vars(model)
    for row in read_csv(f"{trainer.log_dir}/clients.csv"):
        x = trainer.clients.vector("local_model", int(row["client"]))[:d]
        distance = (x - initial).double().square().sum().item()
        assert float(row["distance"]) == pytest.approx(distance, rel=1e-6)
        assert float(row["dual"]) == pytest.approx(0.01 * distance, rel=1e-6)
    metrics = read_csv(f"{trainer.log_dir}/metrics.csv")[1]
    assert float(metrics["comm/bytes_down"]) == 3 * 4 * (d + b)
    assert float(metrics["comm/bytes_up"]) == 3 * (4 * (d + b) + 4)


def test_evaluation_equals_a_loop_by_hand(run):
    """Pooled, local mean and weighted, spread, worst tenth."""
    trainer, model, data, last = run.trainer, run.model, run.data, run.metrics[-1]

    def accuracy(module, clients):
        module.eval()
        parts = [data.client_test_dataset(i).tensors for i in clients]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return (module(inputs).argmax(1) == targets).float().mean().item()

    assert float(last["accuracy/global"]) == pytest.approx(accuracy(model, range(6)), abs=1e-6)
    of_z = np.array([accuracy(model, [i]) for i in range(6)])
    assert float(last["accuracy/std"]) == pytest.approx(of_z.std(), abs=1e-6)
    assert float(last["accuracy/worst10"]) == pytest.approx(of_z.min(), abs=1e-6)
    assert float(last["accuracy/least_data"]) == pytest.approx(of_z[0], abs=1e-6)
    assert float(last["accuracy/most_data"]) == pytest.approx(of_z[5], abs=1e-6)
    of_x = []
    for i in range(6):
        local, x, d = make_model(), trainer.clients.vector("local_model", i), trainer.layout.num_parameters
        local.load_state_dict(trainer.layout.named_slices(x), strict=False)
        local.net[1].running_mean.copy_(x[d : d + 8]), local.net[1].running_var.copy_(x[d + 8 :])
        of_x.append(accuracy(local, [i]))
    sizes = [len(data.client_test_dataset(i)) for i in range(6)]
    assert float(last["accuracy/local"]) == pytest.approx(np.mean(of_x), abs=1e-6)
    assert float(last["accuracy/local_weighted"]) == pytest.approx(np.average(of_x, weights=sizes), abs=1e-6)
    rows = [row for row in run.evaluation if row["round"] == last["round"]]
    assert [row["client"] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [float(row["accuracy/global"]) for row in rows] == pytest.approx(of_z, abs=1e-6)
    assert [float(row["accuracy/local"]) for row in rows] == pytest.approx(of_x, abs=1e-6)


def test_a_test_gives_the_numbers_of_the_log(run):
    """From the checkpoint and after the run, with its own local models, data and method."""
    root, last = run.trainer.default_root_dir, run.metrics[-1]
    another = make_trainer(root, name="here").test(make_model(), BoringData(), FedBC(dual_lr=0.01), ckpt_path="last")
    for found in (another, run.trainer.test(run.model)):
        for name in ("accuracy/global", "loss/local", "accuracy/std"):
            assert found[name] == float(last[name])


def test_the_checkpoint_is_an_ordinary_lightning_one(run):
    loaded = BoringModel.load_from_checkpoint(f"{run.trainer.log_dir}/checkpoints/last.ckpt", weights_only=True)
    assert loaded.hparams["lr"] == 0.1
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("monitor", "options", "stops"), [("loss/global", {}, 1), ("train_loss", {"eval_every_n_rounds": 0}, 2)]
)
def test_early_stopping_looks_after_rounds(tmp_path, monitor, options, stops):
    stop = EarlyStopping(monitor, patience=1, min_delta=10.0)
    trainer, _ = fit(tmp_path, callbacks=stop, max_rounds=20, **options)
    assert trainer.current_round == stops
    assert len(read_csv(f"{trainer.log_dir}/metrics.csv")) == stops + 1


def test_round_checkpoint_keeps_the_best_and_only_last_ckpt_goes_on_in_its_folder(tmp_path):
    keep = RoundCheckpoint("accuracy/global")
    trainer, _ = fit(tmp_path, callbacks=keep)
    rows = read_csv(f"{trainer.log_dir}/metrics.csv")
    column = [float(row["accuracy/global"]) for row in rows]
    assert keep.best == pytest.approx(max(column))
    best = f"{trainer.log_dir}/checkpoints/best.ckpt"
    saved = torch.load(best, weights_only=True)
    assert saved["fedbc_lightning"]["round"] == keep.best_round == column.index(max(column))
    other = make_trainer(tmp_path, max_rounds=4)
    other.fit(make_model(), BoringData(), FedAvg(), ckpt_path=best)
    assert other.log_dir != trainer.log_dir
    assert read_csv(f"{trainer.log_dir}/metrics.csv") == rows


@pytest.mark.parametrize("is_trained", [False, True])
def test_round_checkpoint_leaves_validate_alone(tmp_path, is_trained):
    class Model(BoringModel):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))

    keep = RoundCheckpoint("loss/val_global", mode="min")
    trainer = make_trainer(tmp_path, callbacks=keep)
    model, data, algorithm = make_model(Model), BoringData(8, val_fraction=0.2, drop_last=True), FedAvg()
    if is_trained:
        trainer.fit(model, data, algorithm)
        keep.best = math.inf  # any number would now be the best one
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.ckpt")}
    assert "loss/val_global" in trainer.validate(model, data, algorithm)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.ckpt")} == before
    assert keep.best == (math.inf if is_trained else None)


def test_a_parameter_without_gradient_is_left_alone_as_under_torch(tmp_path):
    """Weight decay must not touch it, so the client is run again with the per-tensor optimizer."""

    class Model(BoringModel):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.ones(3))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.5)

        def on_client_start(self, client):
            self.net[0].weight.data.zero_()

    class PerTensor(Model):
        def optimizer_zero_grad(self, *args):  # no client begins again: there are no flat slices
            super().optimizer_zero_grad(*args)

    trainer, model = fit(tmp_path, model=make_model(Model))
    assert model.unused.tolist() == [1, 1, 1]
    assert not trainer.federation.bench.optimizer.is_flat
    assert_equal_trees(model.state_dict(), fit(tmp_path, model=make_model(PerTensor))[1].state_dict())


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_optimizers_on_flat_slices_equal_per_tensor_ones_bit_for_bit(tmp_path, optimizer):
    class Model(BoringModel):
        def configure_optimizers(self):
            groups = [{"params": self.net[3].parameters()}, {"params": self.net[:3].parameters(), "lr": 0.02}]
            options = {"initial_accumulator_value": 0.5} if optimizer == "Adagrad" else {}
            return getattr(torch.optim, optimizer)(groups, lr=0.01, weight_decay=0.1, **options)

    flat, _ = fit(tmp_path / "flat", model=make_model(Model), local_epochs=2, max_rounds=2)
    trainer = make_trainer(tmp_path / "views", local_epochs=2, max_rounds=2)

    class UseViews(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.federation.bench.optimizer.use_per_tensor()

    trainer.callbacks.append(UseViews())
    trainer.fit(make_model(Model), BoringData(), FedAvg())
    assert flat.federation.bench.optimizer.is_flat
    assert torch.equal(flat.server.z, trainer.server.z)


def test_evaluation_interval_and_client_subset(tmp_path):
    trainer, _ = fit(tmp_path, eval_every_n_rounds=2, eval_clients=2)
    rows = read_csv(f"{trainer.log_dir}/metrics.csv")
    assert [bool(row["loss/global"]) for row in rows] == [True, False, True, True]
    assert rows[-1]["num_clients/evaluated"] == "2.0"


def methods_of_loaders():
    return [getattr(kind, name) for kind in (DataLoader, BatchSampler) for name in ("__init__", "__setattr__")]


def test_dataloaders_are_as_torch_made_them_in_a_run_and_after_one_that_fails(tmp_path):
    """Fabric's replaced methods would be another layer deep after each run that fails."""
    methods = methods_of_loaders()
    seen = []

    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            seen.append(methods_of_loaders())
            raise ValueError("a mistake of the user's")

    with pytest.raises(ValueError, match="mistake of the user's"):
        fit(tmp_path, model=make_model(Model))
    assert seen == [methods]
    assert methods_of_loaders() == methods


def test_draws_in_round_hooks_are_a_function_of_the_round(tmp_path):
    class Draws(BoringModel):
        def on_round_start(self):
            self.log("draw", torch.rand(()))

        def on_round_end(self):
            self.log("my/draw", torch.rand(()))

    whole, _ = fit(tmp_path / "a", model=make_model(Draws), max_rounds=4)
    fit(tmp_path / "b", model=make_model(Draws), max_rounds=2)
    again = make_trainer(tmp_path / "b", max_rounds=4)
    again.fit(make_model(Draws), BoringData(), FedAvg(), ckpt_path="last")
    columns = [[row["my/draw"] for row in read_csv(f"{t.log_dir}/metrics.csv")] for t in (whole, again)]
    assert columns[0] == columns[1]
    assert len(set(columns[0])) == 5
