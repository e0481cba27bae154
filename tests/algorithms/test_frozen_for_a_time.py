"""A layer that a client's hooks freeze for a time is moved by no method, or the method says so in one line."""

from contextlib import nullcontext

import pytest
import torch
from helpers.user_modules import ThawingClassifier, UserData

from algorithms.registry import METHODS
from algorithms.running import QUIET
from fedbc_lightning import ConfigurationError, FederatedTrainer

REFUSED = ("perfed", "fedlils", "pfedme", "apfl", "moon", "composed-scaffold", "fedrep", "fedbabu")
"""Methods with steps of their own, and those that need more than this module has."""


class Frozen(ThawingClassifier):
    """Whose first layer never thaws."""

    num_epochs = 0

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(False)
        self.num_epochs += 1


@pytest.mark.parametrize("setting", METHODS, ids=lambda setting: setting.name)
def test_a_layer_that_hooks_freeze_stays_or_is_refused(tmp_path, setting):
    torch.manual_seed(0)
    model = Frozen()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer = FederatedTrainer(**QUIET | {"default_root_dir": str(tmp_path), "max_rounds": 2})
    with pytest.raises(ConfigurationError) if setting.name.startswith(REFUSED) else nullcontext():
        trainer.fit(model, datamodule=UserData((20, 12)), algorithm=setting.build())
    if not setting.name.startswith(REFUSED):
        moved = [float((now.detach() - then).abs().max()) for now, then in zip(model.parameters(), before, strict=True)]
        assert max(moved) > 1e-4
        assert not model.num_epochs or max(moved[:2]) < 1e-6  # L2GD and its kin have no epochs
