"""A ReduceLROnPlateau on a validation metric belongs to the rounds; advice on validation data is right (issue 20)."""

from __future__ import annotations

import pytest
import torch
from helpers.user_modules import FEATURES, UserData, _Classifier
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch.nn import functional

from fedbc_lightning import FedAvg, FederatedTrainer, PartitionedDataModule
from fedbc_lightning.commands.main import main
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.module import collector
from fedbc_lightning.partition import IID

from .test_parity import fresh, read_rows
from .test_refusals import Wrapped, _pairs

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


def run(tmp_path, module, data, **options):
    settings = {
        "max_rounds": 5, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    trainer = FederatedTrainer(**settings | options)
    trainer.fit(module, data, FedAvg())
    return trainer


@pytest.mark.parametrize(("every", "monitor"), [(1, monitor) for monitor in MONITORS] + [(2, "val_loss")])
def test_the_rate_of_a_round_is_what_torchs_scheduler_makes_of_the_validation_losses(tmp_path, every, monitor):
    """After each evaluated round torch's own scheduler is given the loss of metrics.csv."""
    module = fresh(Plateau)
    module.monitor, module.logged = monitor, "val_loss" if monitor == "loss/val_global" else monitor
    trainer = run(tmp_path, module, Validated(), eval_every_n_rounds=every)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, expected, found = module.plateau(optimizer), [], []
    for row in read_rows(trainer, "metrics.csv")[1:]:
        expected.append(optimizer.param_groups[0]["lr"])
        found.append(float(row["train/lr"]))
        if row["loss/val_global"]:
            scheduler.step(float(row["loss/val_global"]))
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(found)) > 1


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


class Takes(FederatedDataModule):
    """Its own __init__ takes what the base class's takes."""

    num_clients = 2

    def client_train_dataset(self, client):
        return _pairs()

    def client_test_dataset(self, client):
        return None


def wrapped():
    return PartitionedDataModule(Wrapped(torch.utils.data.DataLoader(_pairs(), batch_size=4)), IID(2))


@pytest.mark.parametrize(
    ("module", "data", "options", "names"),
    [
        (Guarded, lambda: UserData((9, 7)), {}, r"val_loss.*val_fraction=0.1 to super\(\).__init__"),
        (Guarded, wrapped, {}, r"val_loss.*set data.val_fraction, e.g. 0.1"),
        (Guarded, Validated, {"eval_every_n_rounds": 0}, r"val_loss.*eval_every_n_rounds"),
        (Without, Validated, {}, r"val_loss.*validation_step"),
        (Misspelt, Validated, {}, r"'val_loss', which evaluation did not log; there is: .*losses/val_global"),
        (
            Combined,
            Validated,
            {},
            "cannot be combined with one that is stepped inside clients",
        ),
    ],
)
def test_what_will_not_be_logged_is_said_before_training(tmp_path, module, data, options, names):
    """One line that names what is missing."""
    with pytest.raises(ConfigurationError, match=names) as caught:
        run(tmp_path, fresh(module), data(), **options)
    assert "\n" not in str(caught.value)


def test_a_run_without_validation_data_is_not_told_to_split_some_off_afterwards(tmp_path):
    """That would be refused by the checkpoint, and the samples were trained on."""
    module, data = fresh(_Classifier), Takes(batch_size=4)
    trainer = run(tmp_path, module, data, max_rounds=1)
    with pytest.raises(ConfigurationError, match=r"no validation data; the run was trained on every sample; use test"):
        trainer.validate(module, data, FedAvg())
    with pytest.raises(ConfigurationError, match=r"no validation data; set data.val_fraction"):
        trainer.validate(fresh(_Classifier), data, FedAvg())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "missing: algorithm, data, model. Give a --config, such as --config digits.yaml, or --algorithm "),
        (
            ["fit", "--trainer.num_clients", "3"],
            "'trainer.num_clients': did you mean --data.partitioner.num_clients",
        ),
        (
            ["fit", "--trainer.val_fraction", "0.1"],
            "'trainer.val_fraction': did you mean --data.val_fraction?",
        ),
        (["fit", "--trainer.dual_lr", "0.1"], "unknown key 'trainer.dual_lr': did you mean --algorithm.dual_lr?"),
        (["fit", "--trainer.lr", "0.1"], "unknown key 'trainer.lr': did you mean --model.lr"),
        (["fit", "--trainer.max_round", "3"], "did you mean --trainer.max_rounds?"),
    ],
)
def test_the_command_line_advises_what_works(words, said, capsys):
    """Issue 20, wrong advice: --plan.algorithm, and eval_clients for num_clients."""
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


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
