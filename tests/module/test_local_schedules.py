"""``trainer.local_schedules: continue``: epochs, steps and what is scheduled by them go on over the rounds."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.boring import BoringData, BoringModel, Linear, assert_equal_trees, make_model, make_trainer, read_csv
from helpers.refusals import refused
from lightning.pytorch import Callback
from torch import nn
from torch.optim import lr_scheduler

from fedbc_lightning import FedAvg
from fedbc_lightning.algorithms import Ditto, PerFedAvg
from fedbc_lightning.federation.checkpoint_content import module_state_of
from fedbc_lightning.federation.participation import Stragglers
from fedbc_lightning.module import schedulers

from .test_parity import plain

ROUNDS = 4
BATCHES = [1, 3, 4, 6, 7, 9]
"""Number of batches of 16 samples that each client has."""

LIMITS = "max_epochs", "max_steps", "estimated_stepping_batches"

# SequentialLR of torch 2.8 steps its next scheduler in a way that torch itself calls deprecated.
in_a_row = pytest.mark.filterwarnings(r"ignore:The epoch parameter in `scheduler\.step\(\)` was not necessary")


class Scheduled(BoringModel):
    """A scheduler that is made by a function of the optimizer and the module."""

    fails_at = None

    def __init__(self, make=None, interval="epoch", frequency=1):
        super().__init__()
        self.make, self.interval, self.frequency = make, interval, frequency

    def training_step(self, batch, batch_idx):
        if self.fails_at == (self.trainer.current_round, batch_idx):
            raise RuntimeError("stop here")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.make is None:
            return optimizer
        made = self.make(optimizer, self)
        return [optimizer], [
            {"scheduler": scheduler, "interval": self.interval, "frequency": self.frequency, "monitor": "train_loss"}
            for scheduler in (made if isinstance(made, list) else [made])
        ]


class Watch(Callback):
    """Takes down round, client, epoch, step, rate and limits before each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        of = pl_module.trainer
        limits = [getattr(of, name) for name in LIMITS]
        rate = of.optimizers[0].param_groups[0]["lr"]
        self.seen.append((of.current_round, of.current_client, of.current_epoch, of.global_step, rate, *limits))


def by_hand(client, make, interval, frequency, local_epochs=None, local_steps=None):
    """What one client sees, round by round, with counts and a scheduler of its own that live as long as the run."""
    num_batches = BATCHES[client]
    num_steps = local_steps or local_epochs * num_batches
    epochs = ROUNDS * local_epochs if local_epochs else -(-ROUNDS * num_steps // num_batches)
    limits = epochs, ROUNDS * local_steps if local_steps else -1, ROUNDS * num_steps
    module = SimpleNamespace(trainer=SimpleNamespace(**dict(zip(LIMITS, limits, strict=True))))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.5)
    scheduler = make(optimizer, module)
    for before in range(0, ROUNDS * num_steps, num_steps):
        seen, epoch, after = [], before // num_batches, before + num_steps
        for k in range(num_steps):
            seen.append((epoch, before + k, optimizer.param_groups[0]["lr"], *limits))
            optimizer.step()
            if interval == "step":
                scheduler.step()
            if (k + 1) % num_batches == 0:
                epoch += 1
                if interval == "epoch" and epoch % frequency == 0:
                    scheduler.step()
        yield seen
        # Parts of epochs that were broken off in several rounds may make up another one.
        if interval == "epoch" and after // num_batches > before // num_batches + num_steps // num_batches:
            assert frequency == 1
            scheduler.step()


CASES = {
    "StepLR": (lambda o, m: lr_scheduler.StepLR(o, 3, gamma=0.5), "epoch", 1, {"local_epochs": 2}),
    "every other epoch": (lambda o, m: lr_scheduler.ExponentialLR(o, 0.7), "epoch", 2, {"local_epochs": 3}),
    "broken epochs": (lambda o, m: lr_scheduler.StepLR(o, 2, gamma=0.5), "epoch", 1, {"local_steps": 4}),
    "to zero": (
        lambda o, m: lr_scheduler.LambdaLR(o, lambda epoch: epoch and 1 - epoch / m.trainer.estimated_stepping_batches),
        "epoch", 1, {"local_epochs": 3},
    ),
    "warm-up": (
        lambda o, m: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 30)), "step", 1, {"local_epochs": 2}
    ),
    "one cycle": (
        lambda o, m: lr_scheduler.OneCycleLR(o, 0.5, total_steps=m.trainer.estimated_stepping_batches), "step", 1,
        {"local_epochs": 2},
    ),
    "in a row": (
        lambda o, m: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=9), lr_scheduler.CosineAnnealingLR(o, m.trainer.max_epochs)], [9]
        ), "step", 1, {"local_epochs": 1},
    ),
}  # fmt: skip


@in_a_row
@pytest.mark.parametrize("name", CASES)
def test_rates_and_counts_are_those_of_a_scheduler_that_lives_as_long_as_the_run(tmp_path, monkeypatch, name):
    monkeypatch.setattr(schedulers, "STRIDE", 4)
    make, interval, frequency, local = CASES[name]
    watch = Watch()
    trainer = make_trainer(
        tmp_path, max_rounds=ROUNDS, clients_per_round=4, eval_every_n_rounds=0, local_schedules="continue",
        callbacks=[watch], **local,
    )  # fmt: skip
    trainer.fit(make_model(Scheduled, make=make, interval=interval, frequency=frequency), BoringData(), FedAvg())
    by_round = defaultdict(list)
    for round, client, *values in watch.seen:
        by_round[round, client].append(tuple(values))
    assert len({client for _, client in by_round}) == 6, "each client takes part"
    assert len(by_round) == 4 * ROUNDS, "and two sit out each round"
    expected = [by_hand(client, make, interval, frequency, **local) for client in range(6)]
    for (_, client), values in by_round.items():
        own = next(expected[client])
        assert [value[:2] + value[3:] for value in values] == [value[:2] + value[3:] for value in own]
        assert [value[2] for value in values] == pytest.approx([value[2] for value in own], rel=1e-12)
    for client, num_batches in enumerate(BATCHES):
        taken = sum(len(values) for (_, other), values in by_round.items() if other == client)
        assert trainer.clients.scalar("steps_taken")[client] == taken
        assert trainer.clients.scalar("epochs_taken")[client] == pytest.approx(taken / num_batches)


class OneClient(BoringData):
    """All 16 samples in one batch."""

    num_clients = 1


class ByEpoch(Scheduled):
    """Without state of its optimizer, which is new in each round; the loss is weighed by epoch and step."""

    def training_step(self, batch, batch_idx):
        loss = BoringModel.training_step(self, batch, batch_idx)
        return loss * (1 + self.current_epoch / self.trainer.max_epochs) / (1 + self.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.3)
        return [optimizer], [self.make(optimizer, self)]


def test_one_client_trains_as_under_lightning(tmp_path):
    make = CASES["StepLR"][0]
    trainer = make_trainer(
        tmp_path, clients_per_round=1, local_epochs=2, local_schedules="continue", precision="64-true"
    )
    trainer.fit(make_model(ByEpoch, make=make), OneClient(), FedAvg())
    model = make_model(ByEpoch, make=make)
    plain(tmp_path, model, BoringData(), max_epochs=6, precision="64-true")
    for name, value in module_state_of(trainer.federation).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-10, atol=1e-12)


@in_a_row
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(schedulers, "STRIDE", 4)
    make, interval, _, local = CASES["in a row"]

    def fit(root, fails_at=None, ckpt_path=None):
        trainer = make_trainer(root, max_rounds=ROUNDS, local_schedules="continue", **local)
        model = make_model(Scheduled, make=make, interval=interval)
        model.fails_at = fails_at
        trainer.fit(model, BoringData(), FedAvg(), ckpt_path=ckpt_path)
        folder = Path(trainer.log_dir)
        return torch.load(folder / "checkpoints/last.ckpt", weights_only=True), (folder / "clients.csv").read_bytes()

    whole = fit(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path / "broken", fails_at=(3, 2))
    assert_equal_trees(whole, fit(tmp_path / "broken", ckpt_path="last"))
    last = tmp_path / "broken/default/FedAvg-1/checkpoints/last.ckpt"
    with refused(r"trainer\.local_schedules is continue there, fresh here"):
        make_trainer(tmp_path / "broken").fit(make_model(Scheduled), BoringData(), FedAvg(), last)
    said = rf"local_schedules was continue \(for max_rounds: {ROUNDS}\) when .* \(for max_rounds: {ROUNDS + 1}\)"
    longer = make_trainer(tmp_path / "broken", max_rounds=ROUNDS + 1, local_schedules="continue", **local)
    model = make_model(Scheduled, make=make, interval=interval)
    with pytest.warns(UserWarning, match=said):
        longer.fit(model, BoringData(), FedAvg(), ckpt_path=last)


class Overflows(BoringModel):
    """The loss of client 5 is NaN in the second round."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (torch.nan if (self.trainer.current_round, self.trainer.current_client) == (2, 5) else 1.0)


def test_a_client_that_is_left_out_keeps_its_counts(tmp_path):
    trainer = make_trainer(
        tmp_path, clients_per_round=6, local_epochs=3, local_schedules="continue",
        stragglers=Stragglers(fraction=0.4, dropout=0.2, partial_work="used"),
    )  # fmt: skip
    trainer.fit(make_model(Overflows), BoringData(), FedAvg())
    taken, statuses = defaultdict(int), set()
    for row in read_csv(trainer.log_dir + "/clients.csv"):
        client = int(row["client"])
        statuses.add(row["status"])
        if row["status"] == "ok":
            taken[client] += int(row["num_steps"])
        if row["status"] != "absent":
            assert float(row["steps_taken"]) == taken[client]
            assert float(row["epochs_taken"]) == taken[client] / BATCHES[client]
    assert statuses == {"ok", "nonfinite", "absent"}
    assert [int(n) for n in trainer.clients.scalar("steps_taken")] == [taken[k] for k in range(6)]


@pytest.mark.parametrize("algorithm", [FedAvg, PerFedAvg, Ditto])
def test_both_engines_count_alike_and_keep_their_numbers(tmp_path, algorithm):
    ended = {}
    for engine in ("sequential", "vectorized"):
        for schedules in ("fresh", "continue"):
            trainer = make_trainer(
                tmp_path / engine / schedules, engine=engine, local_schedules=schedules, precision="64-true"
            )
            trainer.fit(make_model(Linear), BoringData(), algorithm())
            rows = read_csv(trainer.log_dir + "/clients.csv")
            counts = [(row.pop("epochs_taken", None), row.pop("steps_taken", None)) for row in rows]
            ended[engine, schedules] = trainer.server.z, rows, counts
        assert_equal_trees(ended[engine, "fresh"][:2], ended[engine, "continue"][:2])
        assert set(ended[engine, "fresh"][2]) == {(None, None)}
    assert ended["sequential", "continue"][2] == ended["vectorized", "continue"][2]


class Forgetful(lr_scheduler.ConstantLR):
    """Keeps a count where its state_dict does not see it."""

    def __init__(self, optimizer):
        self.hidden = [0]
        super().__init__(optimizer)

    def state_dict(self):
        return {"last_epoch": self.last_epoch}

    def get_lr(self):
        self.hidden[0] += 1
        return [0.1 / self.hidden[0] for _ in self.optimizer.param_groups]


class OwnStep(Scheduled):
    """Steps its scheduler by itself."""

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(self.current_epoch)


class Mixed(Scheduled):
    """One scheduler by epoch, another by step."""

    def configure_optimizers(self):
        (optimizer,), (config,) = super().configure_optimizers()
        return [optimizer], [config, {**config, "interval": "step"}]


def constant(optimizer, module):
    return lr_scheduler.ConstantLR(optimizer)


REFUSED = [
    ({"make": lambda o, m: lr_scheduler.ReduceLROnPlateau(o)}, r"not be stepped \d+ times \(TypeError: .*metrics"),
    ({"make": constant, "interval": "step", "frequency": 2}, "or a frequency above 1 of interval step"),
    ({"make": lambda o, m: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9), "interval": "step"},
     r"OneCycleLR could not be stepped 27 times \(ValueError: Tried to step 10 times"),
    ({"make": lambda o, m: Forgetful(o)}, "Forgetful keeps something that its state_dict does not hold"),
    ({"make": lambda o, m: lr_scheduler.LambdaLR(o, lambda _: 1 / (1 + m.global_step))},
     r"configure_optimizers or a scheduler reads self\.trainer\.global_step"),
    ({"make": lambda o, m: lr_scheduler.LambdaLR(o, lambda _: 1 / (1 + m.trainer.current_round))},
     r"LambdaLR reads self\.trainer\.current_round, which changes"),
    ({"make": lambda o, m: lr_scheduler.LambdaLR(o, lambda _, start=m.trainer.current_epoch: 1.0)},
     r"reads self\.trainer\.current_epoch"),
    ({"make": constant, "module": OwnStep}, "the module's own lr_scheduler_step"),
    ({"make": constant, "module": Mixed}, "both intervals at once"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said[:20] for _, said in REFUSED])
def test_a_scheduler_that_cannot_be_carried_on_is_refused(tmp_path, monkeypatch, options, said):
    monkeypatch.setattr(schedulers, "STRIDE", 2)
    options = dict(options)
    model = make_model(options.pop("module", Scheduled), **options)
    with refused("local_schedules: continue .*" + said):
        make_trainer(tmp_path, local_schedules="continue").fit(model, BoringData(), FedAvg())
    assert not (tmp_path / "default").exists(), "before training"
