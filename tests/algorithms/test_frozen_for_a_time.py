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
    """Whose first layer is frozen in each second epoch, and that keeps how far it moved in these and in others."""

    def __init__(self):
        super().__init__()
        self.moved = {True: [0.0], False: [0.0]}

    def on_train_epoch_start(self):
        self.before = self.net[0].weight.detach().clone()
        self.net[0].requires_grad_(self.current_epoch % 2 == 0)

    def on_train_epoch_end(self):
        moved = self.net[0].weight.detach() - self.before
        self.moved[self.net[0].weight.requires_grad].append(float(moved.abs().max()))


@pytest.mark.parametrize("setting", METHODS, ids=lambda setting: setting.name)
def test_a_layer_that_hooks_freeze_stays_or_is_refused(tmp_path, setting):
    torch.manual_seed(0)
    settings = QUIET | {"default_root_dir": str(tmp_path), "max_rounds": 2, "local_epochs": 2}
    with pytest.raises(ConfigurationError) if setting.name.startswith(REFUSED) else nullcontext():
        FederatedTrainer(**settings).fit(model := Frozen(), datamodule=UserData((20, 12)), algorithm=setting.build())
    if not setting.name.startswith(REFUSED):
        assert max(model.moved[False]) < 1e-6
        assert max(model.moved[True]) > 1e-4 or len(model.moved[True]) == 1  # L2GD and its kin have no epochs
