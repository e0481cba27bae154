"""A user's module trains the same under plain Lightning and federated (ALGORITHMS 4.3)."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from helpers import user_modules as modules
from helpers.boring import read_csv
from helpers.user_modules import LOGGED, LitAutoEncoder, OneCycleClassifier, UserData
from lightning.pytorch import LightningModule

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import FedAvg

EPOCHS = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip-norm": {"gradient_clip_val": 0.1},
    "clip-value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "clip-zero": {"gradient_clip_val": 0.0},
    "accumulate": {"accumulate_grad_batches": 2},
    "accumulate-clip": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
}
CASES = [
    *((module, "plain") for module in modules.MODULES),
    *((module, variant) for module in (LitAutoEncoder, modules.TiedGenerator) for variant in list(VARIANTS)[1:]),
    (OneCycleClassifier, "accumulate"),
    (modules.BatchNormClassifier, "accumulate-clip"),
    (modules.AdamWGroupsClassifier, "clip-norm"),
    (modules.HooksClassifier, "accumulate-clip"),
    (modules.DictClassifier, "accumulate"),
    (modules.PlateauClassifier, "accumulate"),
    (modules.WarmupClassifier, "accumulate"),
    (modules.LBFGSClassifier, "clip-value"),
]


QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def fresh(module_class: type[LightningModule]) -> LightningModule:
    """The module with the same weights in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return module_class()


def federated(tmp_path: Path, module: LightningModule, data: Any, algorithm: Any = None, **options: Any) -> Any:
    """Fit federated and give the trainer back."""
    settings = {"max_rounds": 1, "local_epochs": EPOCHS, "default_root_dir": str(tmp_path / "federated"), "seed": 0}
    trainer = FederatedTrainer(**QUIET | settings | options)
    trainer.fit(module, datamodule=data, algorithm=algorithm or FedAvg())
    return trainer


def plain(
    tmp_path: Path, module: LightningModule, data: UserData, round: int = 1, client: int = 0, **options: Any
) -> lightning.Trainer:
    """Fit with lightning.Trainer over a client's loader of a round, leaving its advice about workers aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"max_epochs": EPOCHS, "devices": 1, "enable_model_summary": False}
        trainer = lightning.Trainer(default_root_dir=tmp_path / "plain", **QUIET | settings | options)
        data.prepare_data()
        data.setup("fit")
        trainer.fit(module, train_dataloaders=data.client_train_dataloader(client=client, round=round, seed=0))
    return trainer


def trained(tmp_path: Path, module_class: type[LightningModule], **options: Any) -> list[LightningModule]:
    """The module after federated training of one client in one round, and after lightning.Trainer's."""
    modules = [fresh(module_class), fresh(module_class)]
    for fit, module in zip((federated, plain), modules, strict=True):
        fit(tmp_path, module, UserData(), **options)
    return modules


def assert_same(found: LightningModule, expected: LightningModule, tolerance: float = 0.0) -> None:
    states = found.state_dict(), expected.state_dict()
    torch.testing.assert_close(*states, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize(
    ("module_class", "variant"), CASES, ids=[f"{module.__name__}-{variant}" for module, variant in CASES]
)
def test_one_client_one_round_equals_plain_lightning(tmp_path, module_class, variant):
    """Section 4.3: one client, one round of E epochs: parameters and buffers bitwise.

    If a step leaves a parameter without a gradient, its norm is a zero here and missing there, and the sum may round
    differently in the last bit.
    """
    options = VARIANTS[variant]
    before = copy.deepcopy(fresh(module_class).state_dict())
    found, expected = trained(tmp_path, module_class, **options)
    is_partial = module_class is modules.TiedGenerator and "clip" in variant
    assert_same(found, expected, 1e-6 if is_partial else 0.0)
    assert any(name not in before or not torch.equal(before[name], v) for name, v in expected.state_dict().items())


@pytest.mark.parametrize(
    "module_class",
    [OneCycleClassifier, modules.BatchNormClassifier, modules.OwnOptimizerClassifier, modules.TiedGenerator],
)
def test_two_rounds_equal_two_plain_fits(tmp_path, module_class):
    """Notation: the optimizer (and its schedulers) are made fresh each round; only weights and buffers last."""
    left, right = fresh(module_class), fresh(module_class)
    for number in (1, 2):
        plain(tmp_path, left, UserData(), round=number)
        left.setup = lambda stage: None
    federated(tmp_path, right, UserData(), max_rounds=2)
    assert_same(right, left, 1e-6)


# Last bits: one flat vector and a list of tensors split differently into vector lanes and remainders.
@pytest.mark.parametrize(("precision", "bound"), [("64-true", 1e-14), ("bf16-mixed", 0.0), ("bf16-true", 1e-2)])
@pytest.mark.parametrize("module_class", [modules.BatchNormClassifier, modules.AdamWGroupsClassifier])
def test_precisions_equal_plain_lightning(tmp_path, module_class, precision, bound):
    """Section 4.3 under Lightning's precisions; server state stays at least float32, so compare as plain."""
    found, expected = trained(tmp_path, module_class, precision=precision)
    assert_same(found.to(expected.dtype), expected, bound)


def test_a_logged_collection_of_metrics_equals_plain_lightnings(tmp_path):
    """Over one epoch of one client; tests/walkers/protocol.py has other values."""
    expected = plain(tmp_path, fresh(modules.CollectionClassifier), UserData(), max_epochs=1).callback_metrics
    found = federated(tmp_path, fresh(modules.CollectionClassifier), UserData(), local_epochs=1).callback_metrics
    for name in ("precision", "recall"):
        assert float(found[f"train/{name}"]) == pytest.approx(float(expected[f"train_{name}"]), abs=1e-6), name


@pytest.mark.parametrize("module_class", [*LOGGED, modules.SetupClassifier])
def test_several_clients_train_and_log(tmp_path, module_class):
    """Two rounds, three unequal clients; train/loss and every logged name are in metrics.csv."""
    module = fresh(module_class)
    trainer = federated(tmp_path, module, UserData((23, 9, 14), test_size=4), max_rounds=2, clients_per_round=2)
    rows = [row for row in read_csv(f"{trainer.log_dir}/metrics.csv") if int(row["round"]) > 0]
    assert [int(row["round"]) for row in rows] == [1, 2]
    for row in rows:
        for name in ("train/loss", *LOGGED.get(module_class, ())):
            assert math.isfinite(float(row[name])), name
    assert all(torch.isfinite(value).all() for value in module.state_dict().values() if value.is_floating_point())
    clients = read_csv(f"{trainer.log_dir}/clients.csv")
    sizes, steps = {0: 23, 1: 9, 2: 14}, {0: 5 * EPOCHS, 1: 2 * EPOCHS, 2: 3 * EPOCHS}
    assert len(clients) == 4
    for row in clients:
        assert int(row["num_samples"]) == sizes[int(row["client"])]
        assert int(row["num_steps"]) == steps[int(row["client"])]


def test_logged_values_are_means_over_samples(tmp_path):
    """What self.log is given is averaged over a client's steps by batch size, then over clients by samples."""

    class LogsBatchSize(LitAutoEncoder):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("first_feature", batch[0][:, 0].mean())
            return loss

    data = UserData((23, 9, 14))
    trainer = federated(tmp_path, fresh(LogsBatchSize), data)
    inputs = torch.cat([data.client_train_dataset(client).tensors[0] for client in range(3)])
    row = next(row for row in read_csv(f"{trainer.log_dir}/metrics.csv") if int(row["round"]) == 1)
    assert float(row["train/first_feature"]) == pytest.approx(inputs[:, 0].mean().item(), abs=1e-6)
    assert trainer.callback_metrics["train/first_feature"] == pytest.approx(inputs[:, 0].mean().item(), abs=1e-6)


def test_a_name_that_some_clients_log_is_the_mean_of_those(tmp_path):
    """A mean over clients weighted by samples is over the clients that have the value."""

    class LogsLate(LitAutoEncoder):
        def training_step(self, batch, batch_idx):
            if batch_idx >= 3:
                self.log("late", 1.0)
            return super().training_step(batch, batch_idx)

    trainer = federated(tmp_path, fresh(LogsLate), UserData((23, 9, 14)))
    assert float(trainer.callback_metrics["train/late"]) == pytest.approx(1.0)
    assert float(trainer.callback_metrics["train/late_num_clients"]) == 1


def test_metric_objects_give_the_accuracy_of_all_samples_of_a_client(tmp_path):
    """A logged torchmetrics object is computed once over the client's samples, and reset between clients."""

    class Frozen(modules.MetricsClassifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    data, module = UserData((23, 9, 14)), fresh(Frozen)
    expected, total = 0.0, 0
    for client in range(3):
        inputs, targets = data.client_train_dataset(client).tensors
        expected += (module(inputs).argmax(1) == targets).sum().item()
        total += len(targets)
    trainer = federated(tmp_path, module, data)
    assert float(trainer.callback_metrics["train/acc"]) == pytest.approx(expected / total, abs=1e-6)
    assert module.train_acc.update_count == 0


def test_reduction_of_logged_values(tmp_path):
    """Largest of an epoch's steps, sum over them; then means over clients."""
    trainer = federated(tmp_path, fresh(modules.ChattyClassifier), UserData((23, 9)), local_epochs=1)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["train/peak"] > metrics["train/loss"]
    assert metrics["train/count"] == pytest.approx((23 * 23 + 9 * 9) / 32)


def test_the_callers_random_generators_are_left_alone(tmp_path):
    """The caller's generators are put back; dropout is a function of (seed, round, client)."""

    class Dropping(LitAutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.encoder.append(torch.nn.Dropout(0.5))

    torch.manual_seed(1)
    first = fresh(Dropping)
    state = torch.get_rng_state()
    federated(tmp_path / "a", first, UserData((9, 7)), max_rounds=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    second = fresh(Dropping)
    federated(tmp_path / "b", second, UserData((9, 7)), max_rounds=2)
    assert_same(first, second)
