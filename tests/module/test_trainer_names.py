"""The names that people's modules ask of ``self.trainer`` answer as lightning.Trainer does, or say what to use."""

import re

import pytest
import torch
from helpers.refusals import refused
from helpers.user_modules import FEATURES, LitAutoEncoder, UserData
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from fedbc_lightning import FedAvg, PartitionedDataModule
from fedbc_lightning.algorithms import FedLiLS
from fedbc_lightning.module.trainer_names import MISSING
from fedbc_lightning.partition import IID

from .test_parity import assert_same, federated, fresh, plain


def test_a_name_without_a_meaning_says_what_is_meant(tmp_path):
    """``hasattr`` is False, and the message says what to use, or the nearest name; the walk reads all others."""
    messages = []
    unknown = {"max_epoch": "'max_epochs'?", "curent_round": "'current_round'?", "xyz": "no name is like it"}

    class Asking(LitAutoEncoder):
        def on_train_start(self):
            for name in (*MISSING, *unknown):
                assert not hasattr(self.trainer, name)
                with pytest.raises(AttributeError) as caught:
                    getattr(self.trainer, name)
                messages.append(str(caught.value))
            with refused("max_epochs cannot be set"):
                self.trainer.max_epochs = 3

    federated(tmp_path, fresh(Asking), UserData((9, 4), test_size=3))
    for message, said in zip(messages, [*MISSING.values(), *unknown.values()], strict=True):
        assert message.endswith(f"{said} (all names: docs/reference/trainer.md)")


class Stopping(LitAutoEncoder):
    """Stops in its seventh step, which is the second of the second epoch, and then in its ninth."""

    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.trainer.should_stop = self.steps in (7, 9)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        """So that the steps are not those of the plain loop."""


class StoppingPlainly(Stopping):
    """The same where nobody listens to steps."""

    on_train_batch_start = LitAutoEncoder.on_train_batch_start


@pytest.mark.parametrize("module_class", [Stopping, StoppingPlainly])
def test_should_stop_ends_the_client_as_it_ends_lightnings_training(tmp_path, module_class):
    """Inside a client the trainer is that client's: it stops after that step, and the next client trains on."""
    left, right = fresh(module_class), fresh(module_class)
    plain(tmp_path, left, UserData())
    federated(tmp_path, right, UserData())
    assert (left.steps, right.steps) == (7, 7)
    assert_same(right, left)
    trainer = federated(tmp_path, module := fresh(module_class), UserData((23, 23)))
    assert [row["num_steps"] for row in trainer.server.records] == [7, 2]
    assert module.steps == 9
    assert trainer.finished_round == 1


def test_should_stop_outside_of_clients_ends_the_run(tmp_path):
    """As a callback's trainer.should_stop does."""

    class StoppingRun(LitAutoEncoder):
        def on_round_end(self):
            assert not self.trainer.should_stop
            self.trainer.should_stop = self.trainer.current_round == 2

    trainer = federated(tmp_path, fresh(StoppingRun), UserData((9, 4)), max_rounds=5, local_epochs=1)
    assert (trainer.finished_round, trainer.should_stop) == (2, True)


@pytest.mark.parametrize(
    ("options", "algorithm", "names"),
    [
        ({"engine": "vectorized"}, FedAvg, r"should_stop.*engine: sequential"),
        ({}, FedLiLS, r"should_stop.*fixed number of steps"),
    ],
)
def test_should_stop_is_refused_where_a_client_cannot_be_stopped(tmp_path, options, algorithm, names):
    """One line where clients train together, or where the method counts the steps itself."""

    class StoppingAtOnce(LitAutoEncoder):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    with refused(names):
        federated(tmp_path, fresh(StoppingAtOnce), UserData((9, 9)), algorithm(), **options)


class Words(LightningDataModule):
    """A data module that knows something of its data."""

    def __init__(self, width: int = FEATURES) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.vocabulary = ["a", "b"]

    def decode(self, index):
        return self.vocabulary[index]

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(12, self.hparams.width), torch.zeros(12)), batch_size=4)


def test_the_data_module_in_a_module_knows_what_the_users_own_knows(tmp_path):
    """Issue 20: trainer.datamodule.anything passes on to the user's data module."""

    class Reading(LitAutoEncoder):
        def on_fit_start(self):
            data = self.trainer.datamodule
            self.read = data.decode(1), data.vocabulary, data.hparams.width, data.num_clients, hasattr(data, "other")

    data = PartitionedDataModule(Words(), IID(3))
    federated(tmp_path, module := fresh(Reading), data)
    assert module.read == ("b", ["a", "b"], FEATURES, 3, False)
    with pytest.raises(AttributeError, match=re.escape("'Words' object has no attribute 'other'")):
        _ = data.other
