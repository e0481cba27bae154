"""What a module brings along: callbacks, a ``log`` of its own, and weights that a run before has trained."""

from __future__ import annotations

import pytest
from helpers.user_modules import LitAutoEncoder, UserData
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging

from fedbc_lightning.core.errors import ConfigurationError

from .test_parity import assert_same, federated, fresh, plain


class Named(Callback):
    def __init__(self, name: str) -> None:
        self.name = name


class Special(Named):
    """A class below the trainer's."""


def bringing(*callbacks):
    class Bringing(LitAutoEncoder):
        def configure_callbacks(self):
            return [*callbacks]

        def on_train_end(self):
            self.names = [getattr(one, "name", None) for one in self.trainer.callbacks]

    return fresh(Bringing)


def test_callbacks_of_a_module_replace_the_trainers_as_in_lightning(tmp_path):
    for fit in (plain, federated):
        fit(tmp_path, module := bringing(Special("module's")), UserData(), callbacks=[Named("trainer's"), Callback()])
        assert module.names == [None, "module's"]


def test_a_module_may_bring_lightnings_checkpoints(tmp_path, caplog):
    """They only watch parts of lightning.Trainer; a callback that would change the training is refused."""
    federated(tmp_path, bringing(ModelCheckpoint(), LearningRateMonitor()), UserData())
    assert "LearningRateMonitor, ModelCheckpoint of configure_callbacks are left out" in caplog.text
    with pytest.raises(ConfigurationError, match="StochasticWeightAveraging needs parts"):
        federated(tmp_path, bringing(StochasticWeightAveraging(1e-2)), UserData())


def test_a_log_of_the_modules_own_is_called(tmp_path):
    """pytorch-forecasting's modules override it and call super().log."""

    class OwnLog(LitAutoEncoder):
        def log(self, name, *args, **kwargs):
            super().log(f"my_{name}", *args, **kwargs)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log_dict({"a": loss, "b": 2 * loss})
            return loss

    left, right = fresh(OwnLog), fresh(OwnLog)
    found = federated(tmp_path, left, UserData()).callback_metrics
    expected = plain(tmp_path, right, UserData()).callback_metrics
    assert {*expected} == {"my_train_loss", "my_a", "my_b"}
    assert {f"train/{name}" for name in expected} <= {*found}
    assert_same(left, right)


class Logging(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("index", float(batch_idx))
        self.log_dict({"loss_twice": 2 * outputs["loss"]})


def test_a_callback_logs_as_in_lightning(tmp_path):
    callback = Logging()
    found = federated(tmp_path, fresh(LitAutoEncoder), UserData(), callbacks=[callback]).callback_metrics
    assert not vars(callback)
    expected = plain(tmp_path, fresh(LitAutoEncoder), UserData(), callbacks=[callback]).callback_metrics
    assert {"index", "loss_twice"} <= {*expected}
    assert {"train/index", "train/loss_twice"} <= {*found}


def test_a_second_fit_says_that_the_module_is_trained(tmp_path, caplog):
    federated(tmp_path, module := fresh(LitAutoEncoder), UserData())
    federated(tmp_path, fresh(LitAutoEncoder), UserData())
    assert "has trained this object" not in caplog.text
    federated(tmp_path, module, UserData())
    assert caplog.text.count("has trained this object") == 1
