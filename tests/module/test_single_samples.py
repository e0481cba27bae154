"""BatchNorm and a last batch of one sample: named before the first step of a run, with what to do (issue 20)."""

from __future__ import annotations

import pytest
import torch
from helpers.user_modules import CLASSES, FEATURES, BatchNormClassifier, UserData, _Classifier
from torch import nn

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.algorithms import Centralized
from fedbc_lightning.core.errors import ConfigurationError

from .test_parity import federated, fresh


class Flat(BatchNormClassifier):
    """Counts its steps."""

    steps = 0

    def on_before_optimizer_step(self, optimizer):
        self.steps += 1


class Images(_Classifier):
    """BatchNorm over eight pixels: one sample is enough for a variance."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(32, CLASSES)
        )


class Frozen(BatchNormClassifier):
    """Its BatchNorm stays in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.net[1].eval()


def data(sizes, drop_last=False, batch_size=5):
    made = UserData(sizes, batch_size=batch_size)
    made.drop_last = drop_last
    return made


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_the_client_is_named_before_the_first_step(tmp_path, engine):
    """Client 1 has eleven samples in batches of five; client 0 comes first and is not trained either."""
    module = fresh(Flat)
    with pytest.raises(ConfigurationError, match=r"data.drop_last: client 1 .*one sample.*BatchNorm1d.*than 5"):
        federated(tmp_path, module, data((10, 11)), engine=engine)
    assert module.steps == 0


def test_all_data_of_pooled_training_end_with_one_sample(tmp_path):
    """Six and five samples are eleven."""
    trainer = FederatedTrainer(max_rounds=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"the data of all clients .*one sample"):
        trainer.fit(fresh(Flat), data((6, 5)), Centralized())


@pytest.mark.parametrize(
    ("module", "sizes", "options"),
    [
        (Flat, (10, 12), {}),
        (Flat, (10, 1), {"batch_size": 1, "drop_last": True, "module": _Classifier}),
        (Flat, (10, 11), {"drop_last": True}),
        (Flat, (10, 11), {"local_steps": 2, "local_epochs": None}),
        (Images, (10, 11), {}),
        (Frozen, (10, 11), {}),
        (_Classifier, (10, 11), {}),
    ],
)
def test_what_trains_is_not_refused(tmp_path, module, sizes, options):
    """Where no layer meets a single value for a channel, or no client its last batch."""
    options = dict(options)
    given = {name: options.pop(name) for name in ("drop_last", "batch_size") if name in options}
    module = options.pop("module", module)
    trainer = federated(tmp_path, made := fresh(module), data(sizes, **given), **options)
    assert trainer.finished_round == 1
    assert all(torch.isfinite(value).all() for value in made.state_dict().values())
    assert not any(child._forward_pre_hooks for child in made.modules())


def test_a_client_that_never_takes_part_does_not_stop_the_run(tmp_path):
    """Clients are a function of (seed, round), so it is known who comes."""

    def first(num_clients, num_sampled, seed, round):
        return [0]

    assert federated(tmp_path, fresh(Flat), data((10, 11)), sampler=first, max_rounds=2).finished_round == 2
