"""``trainer.check_isolation``: what leaks from client to client is named, and what does not is left alone."""

import functools
import itertools
import random
from collections import deque

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, Hidden, Linear, assert_equal_trees, make_model, make_trainer
from helpers.marks import each_engine
from helpers.modules_with_more import Teacher, state_of
from lightning.pytorch import Callback
from torch import nn

from fedbc_lightning import FedAvg, FedBC
from fedbc_lightning.core.errors import ConfigurationError

GLOBAL = {"seen": 0}


class Sharing(Linear):
    """Multiplies its loss by a factor that a function of module and batch gives."""

    total = 0

    def __init__(self, factor):
        super().__init__()
        self.factor, self.count, self.seen, self.cache = factor, 0, [], {}
        self.own, self.draws = np.random.default_rng(0), itertools.count()
        self.window = deque(maxlen=4)
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor(self, batch)


class Slowing(Callback):
    """Keeps state of its own, which changes gradients."""

    def __init__(self):
        self.steps = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps += 1
        for parameter in pl_module.parameters():
            parameter.grad /= self.steps


class Fade:
    """A transform that remembers how often it was called."""

    calls = 0

    def __call__(self, inputs):
        self.calls += 1
        return inputs / self.calls


class Fading(Hidden):
    def __init__(self, dataset, transform):
        super().__init__(dataset)
        self.transform = transform

    def __getitem__(self, index):
        inputs, target = self.dataset[index]
        return self.transform(inputs), target


class FadingData(BoringData):
    def __init__(self):
        super().__init__()
        self.transform = Fade()

    def client_train_dataset(self, client):
        return Fading(super().client_train_dataset(client), self.transform)


def counts(module, batch):
    module.count += 1
    return 1 / module.count


def counts_on_the_class(module, batch):
    Sharing.total += 1
    return 1 / Sharing.total


def counts_globally(module, batch):
    GLOBAL["seen"] += 1
    return 1 / GLOBAL["seen"]


def grows(module, batch):
    module.seen.append(float(batch[0].mean()))
    return 1 / len(module.seen)


def remembers(module, batch):
    return module.cache.setdefault("scale", 1 + batch[0].abs().mean())


def makes_a_layer(module, batch):
    if not hasattr(module, "late"):
        module.late = nn.Linear(10, 1)
    return 1 + module.late(batch[0]).mean() ** 2


def registers(module, batch):
    if not hasattr(module, "scale"):
        module.register_buffer("scale", 1 + batch[0].abs().mean(), persistent=False)
    return module.scale.clone()


# What leaks -> the factor or the callbacks, and how it is named
LEAKS = {
    "counter": (counts, "model.count changed"),
    "class": (counts_on_the_class, "Sharing.total changed"),
    "list": (grows, "model.seen changed"),
    "cache": (remembers, "model.cache changed"),
    "deque": (lambda m, b: m.window.append(1.0) or sum(m.window), "model.window changed"),
    "own generator": (lambda m, b: 1 + m.own.random(), "model.own changed"),
    "iterator": (lambda m, b: 1 / (1 + next(m.draws)), "changed, but model.draws cannot be compared: look there"),
    "global": (counts_globally, "look there, and for global variables"),
    "layer": (makes_a_layer, "'late.weight' was replaced by another one, or added"),
}


def fit(root, factor=lambda module, batch: 1.0, data=BoringData, algorithm=FedAvg, model=Sharing, **options):
    options = {"max_rounds": 1, "eval_every_n_rounds": 0, "local_epochs": 2, "check_isolation": True} | options
    trainer = make_trainer(root, **options)
    trainer.fit(make_model(model, **({"factor": factor} if model is Sharing else {})), data(), algorithm())
    return trainer


@pytest.mark.parametrize("kind", LEAKS)
def test_what_leaks_from_client_to_client_is_named(tmp_path, kind):
    factor, named = LEAKS[kind]
    with pytest.raises(ConfigurationError) as refused:
        fit(tmp_path, factor)
    assert kind == "layer" or "if client" in str(refused.value)
    assert named in str(refused.value)
    assert Sharing.total == 0


def test_what_callbacks_and_data_keep_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Slowing\.steps changed"):
        fit(tmp_path / "callback", callbacks=[Slowing()])
    with pytest.raises(ConfigurationError, match="a client's data set changed"):
        fit(tmp_path / "data", data=FadingData)


# What leaks nothing: seeded for each client, put back for each, or without an effect on results
RIGHT = {
    "torch": lambda m, b: 1 + torch.rand(()),
    "numpy and random": lambda m, b: 1 + np.random.rand() + random.random(),
    "scratch": lambda m, b: 1 / m.scratch.add_(1).clone(),
    "a buffer that is registered late": registers,
    "counters that are only kept": lambda m, b: 1 + 0 * counts(m, b) + 0 * grows(m, b),
    "a constant that is made once": lambda m, b: m.cache.setdefault("scale", 1.5),
    "an index of the epoch": lambda m, b: 1 / (1 + m.trainer.current_epoch),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_what_leaks_nothing_passes_and_changes_no_number(tmp_path, kind):
    method = functools.partial(FedBC, 0.01) if kind == "scratch" else FedAvg
    ended = [fit(tmp_path / str(on), RIGHT[kind], algorithm=method, check_isolation=on) for on in (False, True)]
    assert_equal_trees(*map(state_of, ended))
    modules = [trainer.federation.user.module for trainer in ended]
    assert modules[0].count == modules[1].count
    assert modules[0].seen == modules[1].seen


@each_engine
def test_a_plain_module_passes_in_both_engines_and_a_teacher_does(tmp_path, engine):
    fit(tmp_path / "plain", model=Linear, engine=engine)
    if engine == "sequential":
        ended = [fit(tmp_path / str(check), model=Teacher, check_isolation=check) for check in (False, True)]
        assert_equal_trees(*map(state_of, ended))


def test_one_client_has_nothing_to_check(tmp_path, caplog):
    class OneClient(BoringData):
        num_clients = 1

    with caplog.at_level("INFO"):
        fit(tmp_path, data=OneClient, clients_per_round=1)
    assert "there is nothing to check" in caplog.text
