"""A user's module trains the same under plain Lightning and federated (ALGORITHMS 4.3, DESIGN 6, 11.1)."""

from __future__ import annotations

import copy
import csv
import math
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from helpers.user_modules import (
    LOGGED,
    AdamWGroupsClassifier,
    BatchNormClassifier,
    ChattyClassifier,
    CollectionClassifier,
    DictClassifier,
    HooksClassifier,
    LBFGSClassifier,
    LitAutoEncoder,
    MetricsClassifier,
    OneCycleClassifier,
    PlateauClassifier,
    TiedGenerator,
    UserData,
    WarmupClassifier,
)
from lightning.pytorch import LightningModule

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import FedAvg

EPOCHS = 3
MODULES = list(LOGGED)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip-norm": {"gradient_clip_val": 0.1},
    "clip-value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "clip-zero": {"gradient_clip_val": 0.0},
    "accumulate": {"accumulate_grad_batches": 2},
    "accumulate-clip": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
}
CASES = [
    *((module, "plain") for module in MODULES),
    *((module, variant) for module in (LitAutoEncoder, TiedGenerator) for variant in VARIANTS if variant != "plain"),
    (OneCycleClassifier, "accumulate"),
    (BatchNormClassifier, "accumulate-clip"),
    (AdamWGroupsClassifier, "clip-norm"),
    (HooksClassifier, "accumulate-clip"),
    (DictClassifier, "accumulate"),
    (PlateauClassifier, "accumulate"),
    (WarmupClassifier, "accumulate"),
    (LBFGSClassifier, "clip-value"),
]


def fresh(module_class: type[LightningModule]) -> LightningModule:
    """The module with the same weights in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return module_class()


def federated(tmp_path: Path, module: LightningModule, data: UserData, **options: Any) -> Any:
    """Fit federated and give the trainer back."""
    settings = {
        "max_rounds": 1,
        "local_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "default_root_dir": str(tmp_path / "federated"),
        "seed": 0,
    }
    trainer = FederatedTrainer(**settings | options)
    trainer.fit(module, datamodule=data, algorithm=FedAvg())
    return trainer


def plain(tmp_path: Path, module: LightningModule, data: UserData, round: int = 1, **options: Any) -> lightning.Trainer:
    """Fit with lightning.Trainer over client 0's loader of a round, leaving its advice about workers aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path / "plain",
            **{"max_epochs": EPOCHS} | options,
        )
        data.prepare_data()
        data.setup("fit")
        trainer.fit(module, train_dataloaders=data.client_train_dataloader(client=0, round=round, seed=0))
    return trainer


@pytest.mark.parametrize(
    ("module_class", "variant"), CASES, ids=[f"{module.__name__}-{variant}" for module, variant in CASES]
)
def test_one_client_one_round_equals_plain_lightning(tmp_path, module_class, variant):
    """Section 4.3: one client, one round of E epochs: parameters and buffers bitwise (norm clipping: 1e-6)."""
    options = VARIANTS[variant]
    left, right = fresh(module_class), fresh(module_class)
    before = copy.deepcopy(left.state_dict())
    plain(tmp_path, left, UserData(), **options)
    federated(tmp_path, right, UserData(), **options)
    found, expected = right.state_dict(), left.state_dict()
    assert found.keys() == expected.keys()
    assert any(name not in before or not torch.equal(before[name], expected[name]) for name in expected)
    # A norm over one flat vector and over a list of tensors round differently in the last bit.
    clips_norm = options.get("gradient_clip_algorithm") != "value" and bool(options.get("gradient_clip_val"))
    tolerance = 1e-6 if clips_norm else 0.0
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("module_class", MODULES, ids=lambda module: module.__name__)
def test_two_rounds_equal_two_plain_fits(tmp_path, module_class):
    """Notation: the optimizer (and its schedulers) are made fresh each round; only weights and buffers last."""
    left, right = fresh(module_class), fresh(module_class)
    for number in (1, 2):
        plain(tmp_path, left, UserData(), round=number)
        left.setup = lambda stage: None
    federated(tmp_path, right, UserData(), max_rounds=2)
    for name, value in left.state_dict().items():
        torch.testing.assert_close(
            right.state_dict()[name], value, rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_are_called_in_lightnings_order(tmp_path, accumulate):
    """DESIGN 6: hooks of fit, epochs, batches and steps come in the order and with the arguments of Lightning."""
    left, right = fresh(HooksClassifier), fresh(HooksClassifier)
    plain(tmp_path, left, UserData(), accumulate_grad_batches=accumulate)
    federated(tmp_path, right, UserData(), accumulate_grad_batches=accumulate)
    assert right.calls == left.calls


def test_hooks_of_callbacks_are_called_in_lightnings_order(tmp_path):
    """DESIGN 6: a Lightning Callback sees the step hooks of one client as it would see those of a Trainer's fit."""

    class Spy(lightning.Callback):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def on_fit_start(self, trainer, pl_module):
            self.calls.append("on_fit_start")

        def on_train_start(self, trainer, pl_module):
            self.calls.append("on_train_start")

        def on_train_epoch_start(self, trainer, pl_module):
            self.calls.append(("on_train_epoch_start", pl_module.current_epoch))

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.calls.append(("on_train_batch_start", batch_idx, pl_module.global_step))

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            self.calls.append("on_before_zero_grad")

        def on_before_backward(self, trainer, pl_module, loss):
            self.calls.append("on_before_backward")

        def on_after_backward(self, trainer, pl_module):
            self.calls.append("on_after_backward")

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.calls.append("on_before_optimizer_step")

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.calls.append(("on_train_batch_end", batch_idx, pl_module.global_step))

        def on_train_epoch_end(self, trainer, pl_module):
            self.calls.append(("on_train_epoch_end", pl_module.current_epoch))

        def on_train_end(self, trainer, pl_module):
            self.calls.append("on_train_end")

    left, right = Spy(), Spy()
    plain(tmp_path, fresh(LitAutoEncoder), UserData(), callbacks=[left])
    federated(tmp_path, fresh(LitAutoEncoder), UserData(), callbacks=[right])
    assert right.calls == left.calls


class SkippingSecond(OneCycleClassifier):
    """None from training_step skips a batch; the scheduler of interval ``step`` goes on."""

    skipped = 1

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == self.skipped else loss


class SkippingFirst(SkippingSecond):
    """The first of each epoch's batches is skipped."""

    skipped = 0


class Stopping(LitAutoEncoder):
    """-1 from on_train_batch_start ends an epoch."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("module_class", [SkippingSecond, SkippingFirst, Stopping])
def test_a_module_may_skip_batches_and_the_rest_of_an_epoch(tmp_path, module_class, accumulate):
    """Lightning's contract for -1 and None: same steps, rates and weights; with accumulation no gradient is lost."""
    left, right = fresh(module_class), fresh(module_class)
    plain(tmp_path, left, UserData(), accumulate_grad_batches=accumulate)
    federated(tmp_path, right, UserData(), accumulate_grad_batches=accumulate)
    for name, value in left.state_dict().items():
        torch.testing.assert_close(
            right.state_dict()[name], value, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


# Last bits: one flat vector and a list of tensors split differently into vector lanes and remainders.
@pytest.mark.parametrize(("precision", "bound"), [("64-true", 1e-14), ("bf16-mixed", 0.0), ("bf16-true", 1e-2)])
@pytest.mark.parametrize("module_class", [BatchNormClassifier, AdamWGroupsClassifier])
def test_precisions_equal_plain_lightning(tmp_path, module_class, precision, bound):
    """Section 4.3 under Lightning's precisions; server state stays at least float32 (DESIGN 2), so compare as plain."""
    left, right = fresh(module_class), fresh(module_class)
    plain(tmp_path, left, UserData(), precision=precision)
    federated(tmp_path, right, UserData(), precision=precision)
    for name, value in left.state_dict().items():
        found = right.state_dict()[name].to(value.dtype)
        torch.testing.assert_close(found, value, rtol=bound, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("module_class", "names"),
    [
        (MetricsClassifier, {"train/acc": "train_acc_epoch", "train/f1": "train_f1", "train/margin": "margin"}),
        (CollectionClassifier, {f"train/{name}": f"train_{name}" for name in ("precision", "recall", "confidence")}),
        (CollectionClassifier, {"train/loss": "train_loss"}),
    ],
)
def test_logged_values_equal_plain_lightnings(tmp_path, module_class, names):
    """DESIGN 6: over one epoch of one client, what is logged by epoch has the value that lightning.Trainer gives it."""
    expected = plain(tmp_path, fresh(module_class), UserData(), max_epochs=1).callback_metrics
    found = federated(tmp_path, fresh(module_class), UserData(), local_epochs=1).callback_metrics
    for ours, theirs in names.items():
        assert float(found[ours]) == pytest.approx(float(expected[theirs]), abs=1e-6), ours


def read_rows(trainer: Any, name: str) -> list[dict[str, str]]:
    with (Path(trainer.log_dir) / name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("module_class", MODULES, ids=lambda module: module.__name__)
def test_several_clients_train_and_log(tmp_path, module_class):
    """DESIGN 6, 9: two rounds, three unequal clients; train/loss and every logged name are in metrics.csv."""
    module = fresh(module_class)
    trainer = federated(tmp_path, module, UserData((23, 9, 14), test_size=4), max_rounds=2, clients_per_round=2)
    rows = [row for row in read_rows(trainer, "metrics.csv") if int(row["round"]) > 0]
    assert [int(row["round"]) for row in rows] == [1, 2]
    for row in rows:
        for name in ("train/loss", *LOGGED[module_class]):
            assert math.isfinite(float(row[name])), name
    assert all(torch.isfinite(value).all() for value in module.state_dict().values() if value.is_floating_point())
    clients = read_rows(trainer, "clients.csv")
    sizes, steps = {0: 23, 1: 9, 2: 14}, {0: 5 * EPOCHS, 1: 2 * EPOCHS, 2: 3 * EPOCHS}
    assert len(clients) == 4
    for row in clients:
        assert int(row["num_samples"]) == sizes[int(row["client"])]
        assert int(row["num_steps"]) == steps[int(row["client"])]


def test_logged_values_are_means_over_samples(tmp_path):
    """DESIGN 6: self.log averages over a client's steps by batch size, then over clients by samples."""

    class LogsBatchSize(LitAutoEncoder):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("first_feature", batch[0][:, 0].mean())
            return loss

    data = UserData((23, 9, 14))
    trainer = federated(tmp_path, fresh(LogsBatchSize), data)
    inputs = torch.cat([data.client_train_dataset(client).tensors[0] for client in range(3)])
    row = next(row for row in read_rows(trainer, "metrics.csv") if int(row["round"]) == 1)
    assert float(row["train/first_feature"]) == pytest.approx(inputs[:, 0].mean().item(), abs=1e-6)
    assert trainer.callback_metrics["train/first_feature"] == pytest.approx(inputs[:, 0].mean().item(), abs=1e-6)


def test_a_name_that_some_clients_log_is_the_mean_of_those(tmp_path):
    """DESIGN 6: a mean over clients weighted by samples is over the clients that have the value."""

    class LogsLate(LitAutoEncoder):
        def training_step(self, batch, batch_idx):
            if batch_idx >= 3:
                self.log("late", 1.0)
            return super().training_step(batch, batch_idx)

    trainer = federated(tmp_path, fresh(LogsLate), UserData((23, 9, 14)))
    assert float(trainer.callback_metrics["train/late"]) == pytest.approx(1.0)


def test_metric_objects_give_the_accuracy_of_all_samples_of_a_client(tmp_path):
    """DESIGN 6: a logged torchmetrics object is computed once over the client's samples, and reset between clients."""

    class Frozen(MetricsClassifier):
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
    """DESIGN 6 with self.log's reduce_fx: largest of an epoch's steps, sum over them; then means over clients."""
    trainer = federated(tmp_path, fresh(ChattyClassifier), UserData((23, 9)), local_epochs=1)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["train/peak"] > metrics["train/loss"]
    assert metrics["train/count"] == pytest.approx((23 * 23 + 9 * 9) / 32)


def test_what_the_trainer_says_inside_a_client(tmp_path):
    """DESIGN 6: max_epochs, current_epoch, global_step, estimated_stepping_batches and the rest, per client."""
    seen: list[tuple[Any, ...]] = []

    class Asking(LitAutoEncoder):
        def training_step(self, batch, batch_idx):
            trainer = self.trainer
            assert trainer.training
            assert trainer.is_global_zero
            assert (trainer.global_rank, trainer.world_size) == (0, 1)
            assert trainer.datamodule is data
            assert trainer.max_epochs == EPOCHS
            assert trainer.current_epoch == self.current_epoch
            assert trainer.global_step == self.global_step
            seen.append(
                (
                    trainer.current_round,
                    trainer.current_client,
                    trainer.current_epoch,
                    trainer.global_step,
                    trainer.num_training_batches,
                    trainer.estimated_stepping_batches,
                )
            )
            return super().training_step(batch, batch_idx)

    data = UserData((9, 4))
    federated(tmp_path, fresh(Asking), data, max_rounds=2)
    expected = [
        (client, epoch, epoch * n + step, n, EPOCHS * n)
        for client, n in ((0, 2), (1, 1))
        for epoch in range(EPOCHS)
        for step in range(n)
    ]
    for number in (1, 2):
        assert sorted(row[1:] for row in seen if row[0] == number) == sorted(expected)


def test_an_unknown_attribute_of_the_trainer_says_what_there_is(tmp_path):
    """DESIGN 6: anything else raises with the list of what a client offers."""

    class Odd(LitAutoEncoder):
        def training_step(self, batch, batch_idx):
            self.trainer.epochs  # noqa: B018

    with pytest.raises(Exception, match=r"trainer.epochs.*estimated_stepping_batches"):
        federated(tmp_path, fresh(Odd), UserData())


def test_the_callers_random_generators_are_left_alone(tmp_path):
    """DESIGN 5: the caller's generators are put back; dropout is a function of (seed, round, client)."""

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
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
