"""What hooks set (modes, the optimizer's options, attributes that make it, frozen parameters) is in force, or refused.

What is set × the hook that sets it × module or callback × engine. With one client and one round the numbers are those
of ``lightning.Trainer``; with several rounds those of one plain fit after another, since each has a new optimizer.
``ALL_CASES=1`` runs all cases, else every eleventh one is run.
"""

import itertools
import os
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.user_modules import CLASSES, FEATURES, UserData
from lightning.pytorch import Callback, LightningModule
from torch import nn

from fedbc_lightning import SCAFFOLD, FedAvg, FederatedTrainer
from fedbc_lightning.algorithms import FedNova
from fedbc_lightning.callbacks import RoundCheckpoint
from fedbc_lightning.callbacks.progress_bar import RoundProgressBar
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.engines.recorded import step_recorder
from fedbc_lightning.module.client_optimizers import LocalOptimizer
from module.test_parity import QUIET, fresh, plain

ROUNDS, DECAY = 3, 0.5
ENGINES = ("sequential", "recorded", "vectorized")


class Doubling(nn.Module):
    """Does in training what it does not in evaluation, without buffers and random numbers."""

    factor = 2.0

    def forward(self, inputs):
        return self.factor * inputs if self.training else inputs


class Program(LightningModule):
    """Its ``configure_optimizers`` reads the rate, an attribute, and leaves out a layer that is frozen."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 6), Doubling(), nn.Linear(6, CLASSES))
        self.lr, self.round = 0.1, 1

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self, rate=None):
        layers = ([p for p in self.net[k].parameters() if p.requires_grad] for k in (0, 2))
        return torch.optim.AdamW([{"params": layer} for layer in layers if layer], rate or self.lr, weight_decay=0.1)


def groups(module):
    return module.optimizers().param_groups


def set_options(module, **options):
    for group in groups(module):
        group.update(options)


# What is set -> how, in a round
SETTINGS = {
    "modes": lambda module, round: module.net[1].train(round == 2),
    "rate": lambda module, round: set_options(module, lr=0.1 * DECAY**round),
    "decay": lambda module, round: set_options(module, weight_decay=0.1 * DECAY**round),
    "attribute": lambda module, round: setattr(module, "lr", 0.1 * DECAY**round),
    "frozen": lambda module, round: module.net[0].requires_grad_(round == 2),
}
HOOKS = ("setup", "on_fit_start", "on_train_start", "on_round_start", "on_train_epoch_start")
BOTH = ("on_validation_start", "on_validation_end")  # hooks of evaluations set for the next round
OWNERS = {
    "module": (*HOOKS, *BOTH, "on_validation_model_eval", "on_validation_model_train"),
    "callback": (*HOOKS, *BOTH, "on_validation_epoch_start", "on_validation_epoch_end"),
}
# There is no optimizer yet; and modes are put back after an evaluation, as by Lightning.
NOT_SET = {("setup", "rate"), ("setup", "decay")}
NOT_SET |= {(hook, "modes") for hook in OWNERS["module"][5:8] + OWNERS["callback"][5:]}
ALL = [
    ((hook, what), owner, engine)
    for owner, hooks in OWNERS.items()
    for hook, what, engine in itertools.product(hooks, SETTINGS, ENGINES)
    if (hook, what) not in NOT_SET
]
ONE_IN = 1 if os.environ.get("ALL_CASES") else 11


def with_hook(hook, what, owner):
    """The module and its callbacks, of which one sets something in a hook."""

    def round_of(trainer):
        round = getattr(trainer, "current_round", 1)
        return round + 1 if "validation" in hook else round or 1

    def of_module(self, *args):
        SETTINGS[what](self, round_of(self.trainer))

    def of_callback(self, trainer, pl_module, stage=None):
        SETTINGS[what](pl_module, round_of(trainer))

    if owner == "module":
        return fresh(type("Hooked", (Program,), {hook: of_module})), []
    return fresh(Program), [type("Hooking", (Callback,), {hook: of_callback})()]


@cache
def expected(hook, what, rounds):
    """The weights after plain fits."""
    data, model = UserData((16,)), fresh(Program)
    for round in range(1, rounds + 1):
        # lightning.Trainer has made its optimizer when on_train_start sets an attribute; here it is made afterwards.
        is_before = hook == "on_round_start" or (what == "attribute" and hook != "on_train_epoch_start")
        module, callbacks = (fresh(Program), []) if is_before else with_hook(hook, what, "callback")
        module.load_state_dict(model.state_dict())
        if is_before and what in ("rate", "attribute"):
            module.lr = 0.1 * DECAY**round
        elif is_before:
            module, callbacks = with_hook("on_train_start", what, "callback")
            module.load_state_dict(model.state_dict())
            callbacks[0].on_train_start = lambda trainer, module, round=round: SETTINGS[what](module, round)
        plain(Path("unused"), module, data, round, callbacks=callbacks, max_epochs=2)
        model = module
    return [parameter.detach() for parameter in model.parameters()]


def federated(root, model, callbacks, engine, rounds, path=None, method=FedAvg):
    """Two clients with the same data in the vectorized engine, else one."""
    data = SameData((16,) * (2 if engine == "vectorized" else 1), test_size=4)
    trainer = FederatedTrainer(
        **QUIET | {"enable_checkpointing": True}, max_rounds=rounds, local_epochs=2, default_root_dir=root, seed=0,
        callbacks=callbacks, engine="vectorized" if engine == "vectorized" else "sequential",
        record_steps=engine != "sequential",
    )  # fmt: skip
    trainer.fit(model, data, method(), path)
    return trainer


class SameData(UserData):
    """All clients have client 0's samples, in client 0's order."""

    def client_train_dataset(self, client):
        return super().client_train_dataset(0)

    def client_train_dataloader(self, client, *args, **kwargs):
        return super().client_train_dataloader(0, *args, **kwargs)


@pytest.mark.parametrize(("case", "owner", "engine"), ALL[::ONE_IN])
def test_what_a_hook_sets_is_in_force_or_refused(tmp_path, monkeypatch, case, owner, engine):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 3, "mapped": 2})
    hook, what = case
    same_as = "on_round_start" if "validation" in hook else hook
    rounds = ROUNDS if same_as == "on_round_start" else 1
    model, callbacks = with_hook(hook, what, owner)
    is_frozen = what == "frozen" and hook != "setup"
    if (is_frozen or hook == "on_train_epoch_start") and engine == "vectorized":
        with pytest.raises(ConfigurationError, match=r"cannot train with (the hook|layers that hooks have frozen)"):
            federated(tmp_path, model, callbacks, engine, rounds)
        return
    federated(tmp_path, model, callbacks, engine, rounds)
    tolerance = 1e-6 if engine == "vectorized" else 0.0
    torch.testing.assert_close(
        list(model.parameters()), expected(same_as, what, rounds), rtol=100 * tolerance, atol=tolerance
    )


class Accumulating(Program):
    """Its step depends on all that its hooks may change."""

    def __init__(self, factor=1.0, lr=0.1):
        super().__init__()
        self.save_hyperparameters("factor")
        self.lr, self.table, self.stops_in = lr, [[1.0]], None

    def training_step(self, batch, batch_idx):
        if self.trainer.current_round == self.stops_in:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx) * self.hparams.factor * self.table[0][0]

    def made_anew(self):
        return Program.configure_optimizers(self, self.lr / self.trainer.max_epochs)


def scale(module, *, client=None):
    module.lr *= DECAY if client is None else DECAY**client


# What accumulates -> hooks of the module
ACCUMULATING = {
    "a rate": {"on_round_end": lambda m: setattr(m, "lr", m.lr * np.float64(DECAY))},
    "a rate of evaluations": {"on_validation_end": scale},
    "options of evaluations": {"on_validation_start": lambda m: groups(m)[0].update(lr=groups(m)[0]["lr"] * DECAY)},
    "for each model evaluated": {
        "test_step": lambda m, batch, batch_idx: m.log("factor", m.net[1].factor),
        "on_test_epoch_end": lambda m: setattr(m.net[1], "factor", m.net[1].factor * DECAY),
    },
    "a rate read anew": {"on_round_start": scale, "configure_optimizers": Accumulating.made_anew},
    "a rate beside clients' own": {"on_round_start": scale, "on_client_start": lambda m, c: scale(m, client=c)},
    "a hyper-parameter": {"on_round_start": lambda m: m.hparams.update(factor=m.hparams.factor * DECAY)},
    "in containers": {"on_round_start": lambda m: m.table[0].insert(0, m.table[0][0] * DECAY)},
    "of a part": {"on_round_start": lambda m: setattr(m.net[1], "factor", m.net[1].factor * DECAY)},
    "options": {
        "on_train_start": lambda m: set_options(m, lr=0.2),
        "on_round_start": lambda m: groups(m)[0].update(lr=groups(m)[0]["lr"] * DECAY),
    },
    "frozen": {"on_round_end": lambda m: m.net[0].requires_grad_(m.trainer.current_round == 2)},
    "frozen, read anew": {
        "on_round_start": lambda m: m.net[0].requires_grad_(m.trainer.current_round == 2),
        "configure_optimizers": Accumulating.made_anew,
    },
    "weights": {"on_round_start": lambda m: m.net[0].weight.data.mul_(DECAY)},
    "modes": {"on_round_start": lambda m: m.net[1].train(m.trainer.current_round != 2)},
}


RESUMED = [(kind, "last.ckpt", False) for kind in ACCUMULATING]
RESUMED += [(kind, file, is_same) for kind in ("a rate of evaluations", "a rate read anew", "of a part")
            for file, is_same in (("last.ckpt", True), ("every.ckpt", False))]  # fmt: skip


@pytest.mark.parametrize(("kind", "file", "is_same_module"), RESUMED)
def test_a_resumed_run_goes_on_with_what_hooks_had_set(tmp_path, kind, file, is_same_module):
    """From the run's own file or that of ``RoundCheckpoint``, with a new module or the one that was stopped."""
    hooked = type("Hooked", (Accumulating,), ACCUMULATING[kind])
    whole, module = fresh(hooked), fresh(hooked)
    federated(tmp_path / "whole", whole, [], "sequential", 3)
    saves, path = [RoundCheckpoint(None, filename=file, dirpath=tmp_path)], None
    # A round that is stopped begins again with its hooks; in round 1 no checkpoint holds yet what they had set.
    for stops_in in (1 if is_same_module else 2, 3, None):
        module = module if is_same_module else fresh(hooked)
        module.stops_in = stops_in
        with pytest.raises(KeyboardInterrupt) if stops_in else nullcontext():
            federated(tmp_path / "parts", module, saves * (file != "last.ckpt"), "sequential", 3, path)
        path = "last" if file == "last.ckpt" else tmp_path / file
    torch.testing.assert_close(list(module.parameters()), list(whole.parameters()), rtol=0.0, atol=0.0)


class Told(Program):
    """Writes down the rate with which each client begins."""

    def __init__(self):
        super().__init__()
        self.rates = {}

    def training_step(self, batch, batch_idx):
        where = (self.trainer.current_round, self.trainer.current_client)
        self.rates.setdefault(where, groups(self)[0]["lr"])
        return super().training_step(batch, batch_idx)


class Counting(Told):
    """Keeps its optimizer, and makes another one in each call, with a rate that is drawn."""

    def configure_optimizers(self):
        self.calls = getattr(self, "calls", 0) + 1
        self.kept = torch.optim.SGD(self.parameters(), 0.1 * float(torch.rand(())) / self.calls)
        return self.kept


class Scheduled(Told):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]


def in_training(module, *args):
    module.lr *= 0.9


# Hooks that set the rate, and the rate with which each client begins
PROGRAMS = {
    "in training": ({"on_train_batch_start": in_training, "on_client_end": in_training}, lambda round, client: 0.1),
    "for one client": (
        {"on_client_start": lambda module, client: client or setattr(module, "lr", 0.01)},
        lambda _, client: 0.1 if client else 0.01,
    ),
    "for clients": (
        {"on_client_start": lambda module, client: setattr(module, "lr", 0.1 / (2 + client // 2))},
        lambda _, client: 0.1 / (2 + client // 2),
    ),
    "for rounds": (
        {"on_round_start": lambda m: SETTINGS["attribute"](m, m.trainer.current_round), "on_client_end": in_training},
        lambda round, client: 0.1 * DECAY**round,
    ),
}


@pytest.mark.parametrize("base", [Told, Scheduled])
@pytest.mark.parametrize("which", PROGRAMS)
def test_attributes_that_clients_change_reach_no_other_client(which, base):
    hooks, rate = PROGRAMS[which]
    module = fresh(type("Hooked", (base,), hooks))
    FederatedTrainer(**QUIET, max_rounds=2, local_epochs=1, seed=0).fit(module, SameData((16,) * 3), FedAvg())
    assert module.rates == {(r, client): pytest.approx(rate(r, client)) for r in (1, 2) for client in range(3)}


def test_hooks_that_do_nothing_leave_the_optimizer_as_it_was_made():
    names = ("on_round_start", "on_client_start", "on_train_batch_end", "on_train_start")
    rates = []
    for callbacks in ([], [type("Nothing", (Callback,), dict.fromkeys(names, lambda *args: None))()]):
        module = fresh(Counting)
        trainer = FederatedTrainer(**QUIET, max_rounds=ROUNDS, local_epochs=1, seed=0, callbacks=callbacks)
        trainer.fit(module, SameData((16, 16, 16)), FedAvg())
        rates.append(module.rates)
    assert rates[0] == rates[1]


def test_hooks_of_our_own_callbacks_are_not_looked_after(tmp_path, monkeypatch):
    """To compare what a hook leaves in the module takes as long as some steps; the progress bar writes nothing."""
    heard, taking = [], LocalOptimizer.taking_writes
    monkeypatch.setattr(LocalOptimizer, "taking_writes", lambda self, hook: heard.append(hook) or taking(self, hook))
    callbacks = [type("Nothing", (Callback,), {"on_round_start": lambda *args: None})(), RoundProgressBar()]
    options = QUIET | {"enable_checkpointing": True, "default_root_dir": tmp_path, "eval_every_n_rounds": 1}
    FederatedTrainer(**options, max_rounds=2, callbacks=callbacks).fit(fresh(Told), SameData((16,) * 3), FedAvg())
    assert [hook for hook in heard if hook and hook != "on_train_start"] == ["on_round_start"] * 2


class OfRounds(Program):
    """A scheduler of the server has the clients' rates."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "round"}}


REFUSED = {
    "another class": (Program, lambda m: setattr(m, "configure_optimizers", lambda: torch.optim.SGD(m.parameters()))),
    "momentum": (OfRounds, lambda m: set_options(m, momentum=0.9)),
    "a group": (Program, lambda m: groups(m).append({"params": [], "lr": 0.1})),
    "the server's rates": (OfRounds, lambda m: set_options(m, lr=0.2)),
    "what the server's rates are made of": (OfRounds, lambda m: setattr(m, "lr", 0.2)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_methods_were_set_up_for_cannot_be_set(tmp_path, kind):
    base, change = REFUSED[kind]
    module = fresh(type("Hooked", (base,), {"on_train_start": change}))
    with pytest.raises(ConfigurationError, match=r"changed the optimizer's|on_train_start set a learning rate"):
        federated(tmp_path, module, [], "sequential", 1)


OPTIONS = ("momentum", "weight_decay", "lr")
CLIENT_HOOKS = ("on_client_start", "on_train_epoch_start", "on_train_batch_start")
# What a method takes the steps for, hooks of clients and steps may not change
RELIED_ON = {SCAFFOLD: OPTIONS[:2], FedNova: OPTIONS, FedAvg: ()}


@pytest.mark.parametrize("hook", CLIENT_HOOKS)
@pytest.mark.parametrize(("method", "what"), list(itertools.product(RELIED_ON, OPTIONS)))
def test_what_a_method_takes_the_steps_for_is_no_clients_to_set(tmp_path, method, what, hook):
    def change(self, *args):
        set_options(self, **{what: 0.01 if self.trainer.current_epoch == 0 else 0.0})

    module = fresh(type("Hooked", (Program,), {hook: change}))
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
    # A rate that on_client_start sets is one for all of the client's steps.
    is_refused = what in RELIED_ON[method] and (what, hook) != ("lr", "on_client_start")
    refusal = pytest.raises(ConfigurationError, match=r"a hook of client 0 changed|within client 0 the learning rate")
    with refusal if is_refused else nullcontext():
        federated(tmp_path, module, [], "recorded", 1, method=method)
