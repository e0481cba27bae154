"""What a module brings along: callbacks, and weights that a run before has trained."""

from dataclasses import dataclass

import pytest
from helpers.user_modules import LitAutoEncoder, UserData
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging

from fedbc_lightning.core.errors import ConfigurationError

from .test_parity import federated, fresh, plain


@dataclass
class Named(Callback):
    """A dataclass, which has no hash."""

    name: str


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


def test_a_second_fit_says_that_the_module_is_trained(tmp_path, caplog):
    federated(tmp_path, module := fresh(LitAutoEncoder), UserData())
    federated(tmp_path, fresh(LitAutoEncoder), UserData())
    assert "has trained this object" not in caplog.text
    federated(tmp_path, module, UserData())
    assert caplog.text.count("has trained this object") == 1
