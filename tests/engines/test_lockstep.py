"""Runs that train their clients together: the bits of each are those that it has with nobody beside it."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.boring import BoringData, BoringModel, Hidden, assert_equal_trees, make_trainer, read_csv, without_times
from lightning.pytorch import Callback
from test_plain_steps import OPTIMIZERS
from torch import nn
from torch.nn import functional

from fedbc_lightning import SCAFFOLD, ConfigurationError, FedAvg, FedBC, FedProx, recordable
from fedbc_lightning.algorithms import APFL, FedAvgPlus, PFedMe, QFedAvg
from fedbc_lightning.data import ArrayDataset
from fedbc_lightning.engines.stacked.joint_run import JointRun
from fedbc_lightning.engines.stacked.lockstep import Lockstep
from fedbc_lightning.federation.checkpoint_content import state_of
from fedbc_lightning.local import Linear, Proximal


class Data(BoringData):
    """Client i has 5 + 7 i samples, in batches of 4: last batches of 1, 2 and 3."""

    def __init__(self, batch_size=4, **kwargs):
        super().__init__(batch_size, **kwargs)
        self.arrays = [(x[: 7 + 9 * k], y[: 7 + 9 * k]) for k, (x, y) in enumerate(self.arrays)]


class Model(BoringModel):
    """Without buffers; logs a number of its own."""

    def __init__(self, optimizer="sgd", dropout=0.0, num_outputs=3):
        super().__init__()
        self.kind = optimizer
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, num_outputs))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self(inputs)
        self.log("train_accuracy", (outputs.argmax(1) == targets).float().mean())
        return functional.cross_entropy(outputs, targets)

    def configure_optimizers(self):
        return OPTIMIZERS[self.kind](list(self.parameters()))


class OneOutput(Model):
    """Its last product is matrix times vector, whose bits depend on addresses."""

    def __init__(self):
        super().__init__(num_outputs=1)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return functional.mse_loss(self(inputs).squeeze(1), targets.float())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))


class Beside(Callback):
    """Tells the engine who is beside it, and draws where a user's callback may."""

    def __init__(self, member):
        self.member, self.drawn = member, []

    def on_fit_start(self, trainer, pl_module):
        trainer.federation.engine.join(self.member)

    def on_round_end(self, trainer, pl_module):
        self.drawn.append(torch.rand(1).item())


def one_run(found, root, name, member, *, algorithm=FedAvg, model=Model, data=Data, seed=1, **options):
    """A job for a lockstep: what it ended with is ``found[name]``."""
    settings = {"max_rounds": 4, "clients_per_round": 4, "local_epochs": 3, "engine": "vectorized"} | options
    beside = Beside(member)
    trainer = make_trainer(root / name, name=name, seed=seed, callbacks=[beside], **settings)
    torch.manual_seed(seed)
    try:
        trainer.fit(model(), data(), algorithm())
    except (ConfigurationError, SystemExit) as error:
        found[name] = error
        return
    tables = [read_csv(Path(trainer.log_dir, f"{table}.csv")) for table in ("metrics", "clients")]
    found[name] = {
        "z": trainer.server.z, "state": state_of(trainer.federation), "drawn": beside.drawn,
        "clients": tables[1], "metrics": without_times(tables[0]),
    }  # fmt: skip


def run_together(root, runs):
    """What each of the runs ended with, and the lockstep."""
    lockstep, found = Lockstep(), {}
    lockstep.run(
        [partial(lambda name, member: one_run(found, root, name, member, **runs[name]), name) for name in runs]
    )
    return found, lockstep


def check(root, runs):
    """Together, and in two parts, of which one is a run by itself."""
    whole, lockstep = run_together(root / "whole", runs)
    names = list(runs)
    for part, some in (("first", names[:1]), ("rest", names[1:])):
        found, _ = run_together(root / part, {name: runs[name] for name in some})
        for name in some:
            assert not isinstance(whole[name], BaseException), whole[name]
            assert_equal_trees(whole[name], found[name], name)
    return lockstep


ALL_KINDS = {
    "FedAvg": {},
    "other seed": {"seed": 2},
    "FedProx": {"algorithm": lambda: FedProx(mu=0.1)},
    "FedBC": {"algorithm": lambda: FedBC(dual_lr=0.1)},
    "SCAFFOLD": {"algorithm": SCAFFOLD},
    "q-FedAvg": {"algorithm": lambda: QFedAvg(q=1.0, lipschitz=10.0)},
}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_each_has_its_own_bits(tmp_path, monkeypatch, optimizer):
    joined = []
    train_all = JointRun.train_all
    monkeypatch.setattr(JointRun, "train_all", lambda run: joined.append(len(run.runs)) or train_all(run))
    runs = {name: {"model": partial(Model, optimizer), **options} for name, options in ALL_KINDS.items()}
    lockstep = check(tmp_path, runs)
    assert lockstep.reason is None
    assert joined[:4] == [6, 6, 6, 6]  # every round of the first time


def test_convolutions(tmp_path):
    """Their bits are others for one client than for several, so one is taken twice."""

    class Convolution(Model):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))

        def forward(self, inputs):
            return self.net(inputs.view(-1, 1, 2, 5))

    lockstep = check(tmp_path, {name: {"model": Convolution, **options} for name, options in ALL_KINDS.items()})
    assert lockstep.reason is None


def test_what_cannot_be_joined_is_trained_beside(tmp_path):
    runs = {
        "FedAvg": {},
        "APFL": {"algorithm": APFL},
        "pFedMe": {"algorithm": PFedMe},
        "FedAvg+": {"algorithm": lambda: FedAvgPlus(sigma=1.0)},
        "clipped": {"gradient_clip_val": 0.1},
        "longer": {"max_rounds": 6},
    }
    check(tmp_path, runs)


def test_a_step_that_draws_is_taken_apart(tmp_path, capsys):
    runs = {name: {**ALL_KINDS[name], "model": partial(Model, dropout=0.5)} for name in ("FedAvg", "FedBC", "FedProx")}
    lockstep = check(tmp_path, runs)
    assert lockstep.reason == "training_step draws random numbers"


def test_data_that_must_be_read_are_taken_apart(tmp_path):
    class ItemData(Data):
        def client_train_dataset(self, client):
            return Hidden(super().client_train_dataset(client))

    lockstep = check(tmp_path, {name: {**ALL_KINDS[name], "data": ItemData} for name in ("FedAvg", "FedBC", "FedProx")})
    assert "not tensors in memory" in lockstep.reason


def test_bits_that_depend_on_addresses(tmp_path):
    """Whatever the processor gives, with others or apart, it is the same."""
    check(tmp_path, {name: {**ALL_KINDS[name], "model": OneOutput} for name in ALL_KINDS})


def test_other_bits_are_noticed(tmp_path, monkeypatch):
    from fedbc_lightning.engines.step_function import StepFunction

    mapped = StepFunction.mapped

    def depends_on_company(self, parameters, batch, batch_idx=0):
        output = mapped(self, parameters, batch, batch_idx)
        for gradient in output.gradients:
            gradient += 1e-7 * (len(gradient) > 9)
        return output

    monkeypatch.setattr(StepFunction, "mapped", depends_on_company)
    runs = {name: ALL_KINDS[name] for name in ("FedAvg", "FedBC", "FedProx")}
    lockstep = check(tmp_path, runs)
    assert "has other bits" in lockstep.reason


@recordable
def hidden_factor(module):
    return module.factor


def test_bits_that_change_late_end_the_runs(tmp_path):
    class Switched(Model):
        """One run's module becomes another in its second round."""

        num_made = 0

        def __init__(self):
            super().__init__()
            type(self).num_made += 1
            self.factor, self.is_switched = 1.0, type(self).num_made == 3

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * hidden_factor(self)

        def on_round_end(self):
            if self.is_switched and self.current_epoch == 2:
                self.factor = 0.5

    runs = {name: {**ALL_KINDS[name], "model": Switched} for name in ("FedAvg", "FedBC", "FedProx")}
    found, _ = run_together(tmp_path, runs)
    for error in found.values():
        assert isinstance(error, ConfigurationError)
        assert "shows only in round 3" in str(error)
        assert "together: 1" in str(error)


def test_data_that_draw_are_taken_apart(tmp_path):
    def noise(inputs):
        return inputs + torch.rand_like(inputs)

    class Noisy(Data):
        def client_train_dataset(self, client):
            return ArrayDataset(super().client_train_dataset(client).tensors, transform=noise)

    lockstep = check(tmp_path, {name: {**ALL_KINDS[name], "data": Noisy} for name in ("FedAvg", "FedBC", "FedProx")})
    assert "draws random numbers" in lockstep.reason


def test_an_error_of_one_run_leaves_the_others_together(tmp_path, monkeypatch):
    joined = []
    train_all = JointRun.train_all
    monkeypatch.setattr(JointRun, "train_all", lambda run: joined.append(len(run.runs)) or train_all(run))

    class Breaks(Data):
        def client_train_dataloader(self, client, round=0, **kwargs):
            if round == 2:
                raise ConfigurationError("broken file")
            return super().client_train_dataloader(client, round, **kwargs)

    found, lockstep = run_together(tmp_path, {"bad": {"data": Breaks}, "FedAvg": {}, "FedBC": ALL_KINDS["FedBC"]})
    assert str(found["bad"]) == "broken file"
    assert lockstep.reason is None
    assert joined == [3, 2, 2]  # the second round is each one's own


def test_a_run_that_fails_ends_alone(tmp_path):
    class Broken(Data):
        def __init__(self):
            super().__init__()
            self.arrays = [(x * float("nan"), y) for x, y in self.arrays]

    runs = {"FedAvg": {}, "FedBC": ALL_KINDS["FedBC"]}
    found, _ = run_together(tmp_path / "a", {**runs, "bad": {"data": Broken}})
    alone, _ = run_together(tmp_path / "b", runs)
    assert isinstance(found["bad"], ConfigurationError)
    assert "NaN" in str(found["bad"])
    for name in runs:
        assert_equal_trees(found[name], alone[name], name)


@pytest.mark.parametrize("algorithm", [FedAvg, PFedMe])  # the second is trained beside the others
def test_an_end_from_outside_ends_all_at_a_finished_round(tmp_path, algorithm):
    class Stops(Callback):
        def on_round_end(self, trainer, pl_module):
            if trainer.current_round == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    found = {}
    before = signal.getsignal(signal.SIGTERM)
    jobs = [
        lambda member: one_run(found, tmp_path, "a", member),
        lambda member: one_run(found, tmp_path, "b", member, **ALL_KINDS["FedBC"]),
    ]

    def stopped(member):
        trainer = make_trainer(
            tmp_path, name="c", engine="vectorized", callbacks=[Beside(member), Stops()], max_rounds=4
        )
        with pytest.raises(SystemExit):
            trainer.fit(Model(), Data(), algorithm())
        found["c"] = trainer.finished_round

    with pytest.raises(SystemExit):
        Lockstep().run([*jobs, stopped])
    assert signal.getsignal(signal.SIGTERM) == before
    assert found["c"] == 2
    assert isinstance(found["a"], SystemExit)
    assert isinstance(found["b"], SystemExit)
    for name in ("a", "b") if algorithm is FedAvg else ():
        last = torch.load(next((tmp_path / name).rglob("last.ckpt")), weights_only=False)
        assert last["fedbc_lightning"]["round"] == 2


def test_each_prints_where_it_did(tmp_path):
    class Prints(Model):
        def on_fit_start(self):
            print("started")

        def on_round_end(self):
            print(f"round {self.current_epoch}")

    def job(name, member):
        before = sys.stdout
        with (tmp_path / f"{name}.txt").open("w") as sys.stdout:
            one_run(found, tmp_path, name, member, model=Prints)
        sys.stdout = before

    found, before = {}, sys.stdout
    Lockstep().run([partial(job, name) for name in "abc"])
    assert sys.stdout is before
    assert not any(isinstance(ended_with, BaseException) for ended_with in found.values()), found
    for name in "abc":
        assert (tmp_path / f"{name}.txt").read_text().split("\n") == [
            "started",
            *(f"round {k}" for k in range(1, 5)),
            "",
        ]


def test_terms_of_several_runs():
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(k, 4, generator=generator) for k in (2, 3, 1)]
    terms = [Proximal(torch.tensor([1.0, 2.0]), starts[0][0]), None, Proximal(torch.rand(1, 4), starts[2])]
    place = torch.tensor([5, 0, 3, 1, 2, 4])
    w = torch.cat(starts)[place] * 2
    grad = torch.zeros_like(w)
    Proximal.joined(terms, starts, place).add_gradient(grad, w)
    expected = []
    for term, start in zip(terms, starts, strict=True):
        expected.append(torch.zeros_like(start))
        if term is not None:
            term.add_gradient(expected[-1], start * 2)
    assert torch.equal(grad, torch.cat(expected)[place])
    linear = [None, Linear(torch.ones(4)), Linear(torch.full((1, 4), 2.0))]
    assert Linear.joined(linear, starts, place).vector[:, 0].tolist() == [2.0, 0.0, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "term", [Proximal(torch.rand(3), torch.rand(4)), Linear(torch.rand(3, 4)), Linear(torch.rand(4))]
)
def test_the_term_of_the_first_clients(term):
    w = torch.rand(3, 4)
    whole, some = torch.zeros_like(w), torch.zeros(2, 4)
    term.add_gradient(whole, w)
    term.first(2).add_gradient(some, w[:2])
    assert torch.equal(whole[:2], some)


class Capped(Model):
    """The loss of small batches is weighed by an option, which shows in few steps."""

    def __init__(self, share=1.0):
        super().__init__()
        self.share = share

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.share if len(batch[0]) == 3 else loss


def test_runs_whose_models_have_other_options_are_taken_apart(tmp_path):
    runs = {f"share {share}": {"model": partial(Capped, share), "max_rounds": 2} for share in (1.0, 3.0)}
    assert str(check(tmp_path / "other", runs).reason).startswith("their steps read different values")
    runs = {f"seed {seed}": {"model": Capped, "seed": seed, "max_rounds": 2} for seed in (1, 2)}
    assert check(tmp_path / "same", runs).reason is None
