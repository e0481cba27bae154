"""What schedulers and callbacks monitor is found under the name that the module logs, or refused early (issue 20)."""

from functools import partial

import pytest
import torch
from helpers.boring import read_csv
from helpers.refusals import refused
from helpers.user_modules import FEATURES, UserData, _Classifier
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch.nn import functional
from torch.utils.data import DataLoader

from fedbc_lightning import FedAvg, PartitionedDataModule
from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.module import collector
from fedbc_lightning.partition import IID
from fedbc_lightning.state import checkpoint

from .test_parity import federated, fresh
from .test_refusals import _pairs, wrapped

MONITORS = ("val_loss", "val/loss", "valid_loss", "loss/val_global")


class Plateau(_Classifier):
    """As in Lightning's docs; the rate is halved after every evaluation but the first."""

    monitor, logged = "val_loss", "val_loss"

    def training_step(self, batch, batch_idx):
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log(self.logged, functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.plateau(optimizer), "monitor": self.monitor}}

    def plateau(self, optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs"
        )


class Validated(UserData):
    """With validation parts."""

    def __init__(self, sizes=(40, 30), val_fraction=0.2):
        super().__init__(sizes)
        self.val_fraction = val_fraction


run = partial(federated, max_rounds=5, local_epochs=1)


@pytest.mark.parametrize(("every", "monitor"), [(1, monitor) for monitor in MONITORS] + [(2, "val_loss")])
def test_the_rate_of_a_round_is_what_torchs_scheduler_makes_of_the_validation_losses(tmp_path, every, monitor):
    """After each evaluated round torch's own scheduler is given the loss of metrics.csv."""
    module = fresh(Plateau)
    module.monitor, module.logged = monitor, "val_loss" if monitor == "loss/val_global" else monitor
    trainer = run(tmp_path, module, Validated(), eval_every_n_rounds=every)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, expected, found = module.plateau(optimizer), [], []
    for row in read_csv(f"{trainer.log_dir}/metrics.csv")[1:]:
        expected.append(optimizer.param_groups[0]["lr"])
        found.append(float(row["train/lr"]))
        if row["loss/val_global"]:
            scheduler.step(float(row["loss/val_global"]))
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(found)) > 1


def test_a_clients_loss_that_is_no_number_moves_no_rate(tmp_path):
    class Lost(Plateau):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return functional.cross_entropy(self(x), y) + (torch.nan if self.trainer.current_client else 0.0)

        def configure_optimizers(self):
            found = super().configure_optimizers()
            return found | {"lr_scheduler": found["lr_scheduler"] | {"monitor": "train_loss", "interval": "round"}}

    assert run(tmp_path, fresh(Lost), Validated()).federation.schedule.learning_rates == [0.5]


def test_it_trains_in_the_vectorized_engine_too(tmp_path):
    """No scheduler is left inside clients; the rates of the rounds are those of the sequential engine."""

    class Quiet(Plateau):
        training_step = _Classifier.training_step

    rates = []
    for engine in ("sequential", "vectorized"):
        trainer = run(tmp_path, fresh(Quiet), Validated(), engine=engine)
        rates.append(trainer.federation.schedule.learning_rates)
    assert rates[0] == rates[1] != [0.5]


class Guarded(Plateau):
    """Fails the test as soon as it trains."""

    def training_step(self, batch, batch_idx):
        pytest.fail("a training step ran before the refusal")


class Without(_Classifier):
    """Has no step for validation data."""

    training_step, configure_optimizers, plateau = Guarded.training_step, Guarded.configure_optimizers, Guarded.plateau
    monitor = "val_loss"


class Misspelt(Guarded):
    logged = "val_losses"


class Combined(Guarded):
    def configure_optimizers(self):
        found = super().configure_optimizers()
        optimizer = found["optimizer"]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1), found["lr_scheduler"]]


@pytest.mark.parametrize(
    ("module", "data", "options", "names"),
    [
        (Guarded, lambda: UserData((9, 7)), {}, r"val_loss.*val_fraction=0.1 to super\(\).__init__"),
        (Guarded, lambda: wrapped(DataLoader(_pairs(), batch_size=4)), {}, r"val_loss.*set data.val_fraction, e"),
        (Guarded, Validated, {"eval_every_n_rounds": 0}, r"val_loss.*eval_every_n_rounds"),
        (Without, Validated, {}, r"val_loss.*validation_step"),
        (Misspelt, Validated, {}, r"'val_loss', which evaluation did not log; there is: .*losses/val_global"),
        (Combined, Validated, {}, "cannot be combined with one that is stepped inside clients"),
    ],
)
def test_what_will_not_be_logged_is_said_before_training(tmp_path, module, data, options, names):
    """One line that names what is missing."""
    with refused(names):
        run(tmp_path, fresh(module), data(), **options)


def test_a_run_without_validation_data_is_not_told_to_split_some_off_afterwards(tmp_path):
    """That would be refused by the checkpoint, and the samples were trained on."""
    module, data = fresh(_Classifier), UserData((9, 7))
    trainer = run(tmp_path, module, data, max_rounds=1)
    with refused(r"no validation data; set data.val_fraction.* before training"):
        trainer.validate(module, data, FedAvg())
    with refused(r"no validation data; set data.val_fraction"):
        trainer.validate(fresh(_Classifier), data, FedAvg())


class Validates(Plateau):
    configure_optimizers = _Classifier.configure_optimizers


class Untrained(Guarded):
    configure_optimizers = _Classifier.configure_optimizers

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


class WithTest(Validated):
    """With test data, too."""

    client_test_dataset = Validated.client_train_dataset


class Keeps(Callback):
    """Writes down what it finds, as a callback of the user's own does."""

    def __init__(self, monitor):
        self.monitor, self.found = monitor, []

    def on_validation_end(self, trainer, pl_module):
        self.found.append(trainer.callback_metrics[self.monitor].item())


def test_test_data_that_choose_the_rates_are_named(tmp_path):
    module = fresh(Plateau)
    module.monitor, module.test_step = "test_loss", module.validation_step
    with pytest.warns(UserWarning, match="a scheduler monitors 'test_loss', of the test data; let it monitor 'val_lo"):
        run(tmp_path, module, WithTest())


@pytest.mark.parametrize("monitor", ["val_loss", "valid/loss", "test_loss"])
def test_a_callback_reads_the_metric_of_the_global_model_under_the_modules_name(tmp_path, monitor):
    best, keeps = RoundCheckpoint(monitor, "min"), Keeps(monitor)
    stop = EarlyStopping(monitor, min_delta=10.0, patience=2)
    trainer = run(tmp_path, fresh(Validates), WithTest(), callbacks=[stop, best, keeps], enable_checkpointing=True)
    rows = read_csv(f"{trainer.log_dir}/metrics.csv")
    logged = [float(row["loss/global" if monitor == "test_loss" else "loss/val_global"]) for row in rows]
    assert len(rows) == 3  # of 6: it stopped two evaluations after the first
    assert keeps.found == pytest.approx(logged, rel=1e-6)
    assert best.best == pytest.approx(min(logged), rel=1e-6)
    for name in ("best", "last"):  # the same metric is not kept under two names
        saved = checkpoint.load(f"{trainer.log_dir}/checkpoints/{name}.ckpt")[checkpoint.KEY]["callback_metrics"]
        assert monitor not in saved
        assert "loss/val_global" in saved
    assert monitor not in trainer.callback_metrics


def test_a_name_that_is_logged_as_it_is_monitored_is_meant_as_it_is(tmp_path):
    """A hook at the end of rounds logs it: it does not come with round 0, and need not be data's."""

    class Logs(Callback):
        def on_round_end(self, trainer, pl_module):
            pl_module.log("val_score", torch.tensor(float(trainer.current_round)))

    keeps = Keeps("val_score")
    run(tmp_path, fresh(Validates), UserData((9, 7)), callbacks=[Logs(), keeps], max_rounds=2)
    assert keeps.found == [1.0, 2.0]


@pytest.mark.parametrize(
    ("data", "monitor", "options", "said"),
    [
        (UserData, "val_loss", {}, r"monitors 'val_loss', which evaluation logs, but there is no validation data; set"),
        (Validated, "val_losses", {}, r"monitors 'val_losses', which nothing logs; there is: .*loss/val_global,"),
        (Validated, "loss/val_local", {"keep_local_models": False}, r"monitors 'loss/val_local', which nothing logs"),
    ],
)
def test_what_can_never_come_is_refused_before_training(tmp_path, data, monitor, options, said):
    with refused(said):
        run(tmp_path, fresh(Untrained), data((9, 7)), callbacks=EarlyStopping(monitor), **options)


class Ragged(torch.utils.data.Dataset):
    """Samples of several rows each, as graphs and sequences are."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": torch.full((index % 3 + 1, FEATURES), float(index)), "y": torch.tensor(float(index))}


def collate(samples):
    return {"x": torch.cat([s["x"] for s in samples]), "y": torch.stack([s["y"] for s in samples])}


@pytest.mark.parametrize(("is_given", "num_warnings"), [(True, 0), (False, 1)])
def test_sizes_of_batches_are_asked_for_once_and_only_where_they_are_not_given(
    tmp_path, monkeypatch, recwarn, is_given, num_warnings
):
    """Issue 20: "Trying to infer the batch_size" came once per size, although every self.log gave it."""
    monkeypatch.setattr(collector, "_cache", WarningCache())

    class Logs(_Classifier):
        def training_step(self, batch, batch_idx):
            loss = self(batch["x"]).square().mean()
            self.log("train_loss", loss, batch_size=len(batch["y"]) if is_given else None)
            return loss

    run(tmp_path, fresh(Logs), PartitionedDataModule(Ragged(), IID(2), collate_fn=collate, batch_size=2), max_rounds=1)
    said = [str(warning.message) for warning in recwarn if "batch" in str(warning.message)]
    assert len(said) == num_warnings
    assert all("batch_size=" in text for text in said)
