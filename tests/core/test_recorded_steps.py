"""Recorded steps: the numbers of the module's own step bit for bit; what is more than a function is not recorded."""

import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fedbc_lightning.models import CIFARCNN
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_trainer
from lightning.pytorch import Callback
from test_plain_steps import OPTIMIZERS
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fedbc_lightning import SCAFFOLD, FedAvg, FedBC
from fedbc_lightning.engines import step_recorder
from fedbc_lightning.engines.step_recorder import StepRecorder


class Model(BoringModel):
    """No buffers; logs a tensor and a number."""

    def __init__(self, optimizer="momentum"):
        super().__init__()
        self.kind = optimizer
        self.net = nn.Sequential(nn.Linear(10, 8), self.make_middle(), nn.Linear(8, 3))

    def make_middle(self):
        return nn.Tanh()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self(inputs)
        self.log("train_size", 0.1 * len(targets))
        self.log("train_accuracy", (outputs.argmax(1) == targets).float().mean(), batch_size=3)
        self.log("train_most", outputs.max(), reduce_fx="max")
        return {"loss": functional.cross_entropy(outputs, targets)}

    def configure_optimizers(self):
        return OPTIMIZERS[self.kind](list(self.parameters()))


class Inplace(Model):
    def make_middle(self):
        return nn.ReLU(inplace=True)


class Dropping(Model):
    """Logs nothing but means, for the vectorized engine."""

    def make_middle(self):
        return nn.Dropout(0.5)

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.log("train_size", 0.1 * len(batch[1]))
        self.log("train_accuracy", (outputs.argmax(1) == batch[1]).float().mean(), batch_size=3)
        return functional.cross_entropy(outputs, batch[1])


class Smooth(Dropping):
    def make_middle(self):
        return nn.Tanh()


class Recurrent(Smooth):
    def __init__(self):
        super().__init__()
        self.net = nn.LSTM(10, 3)

    def forward(self, inputs):
        return self.net(inputs)[0]


class Tied(Model):
    """Two layers with one weight, a frozen one, a normalised one, class weights in a plain attribute."""

    def __init__(self):
        super().__init__()
        last = nn.utils.parametrizations.weight_norm(nn.Linear(10, 3))
        self.net = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Tanh(), last)
        self.net[1].weight = self.net[0].weight
        self.net[1].bias.requires_grad_(False)
        self.weight = torch.tensor([1.0, 2.0, 3.0])

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1], weight=self.weight)


class Evaluated(Smooth):
    """Its Metrics belong to evaluation."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def test_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("test_accuracy", self.accuracy)


class Images(BoringData):
    def client_train_dataset(self, client):
        generator = torch.Generator().manual_seed(client)
        labels = torch.randint(3, (20 + 10 * client,), generator=generator)
        return TensorDataset(torch.randn(len(labels), 3, 16, 16, generator=generator), labels)

    def client_test_dataset(self, client):
        return None


@pytest.fixture
def recordings(monkeypatch):
    """Recorders that record the second step of a shape; what they recorded, and where they gave up."""
    seen = SimpleNamespace(recorders=[], replays=0)
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    make, replay = StepRecorder.__init__, StepRecorder._replay

    def make_seen(self, *args):
        make(self, *args)
        seen.recorders.append(self)

    def count(self, *args):
        seen.replays += 1
        return replay(self, *args)

    monkeypatch.setattr(StepRecorder, "__init__", make_seen)
    monkeypatch.setattr(StepRecorder, "_replay", count)
    return seen


def run(root, model, algorithm=FedAvg, data=BoringData, **options):
    torch.manual_seed(0)
    options = {"eval_every_n_rounds": 0, "clients_per_round": 4, "local_epochs": 2} | options
    trainer = make_trainer(root, **options)
    trainer.fit(model(), data(), algorithm())
    return trainer


def compare(root, monkeypatch, model, algorithm=FedAvg, **options):
    """The run as it is against one in which no step is recorded: the state and the tables, bit for bit."""
    recorded = run(root, model, algorithm, name="recorded", **options)
    with monkeypatch.context() as patch:
        patch.setattr(step_recorder, "RECORD_AFTER", {"single": 10**9, "mapped": 10**9})
        written = run(root, model, algorithm, name="written", **options)
    assert_equal_trees(recorded.federation.state_dict(), written.federation.state_dict())
    assert_equal_trees(recorded.federation.module_state(), written.federation.module_state())
    tables = [Path(trainer.log_dir, "clients.csv").read_text() for trainer in (recorded, written)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Model, {}),
        (lambda: Model(optimizer="adam"), {"algorithm": lambda: FedBC(dual_lr=0.1), "gradient_clip_val": 0.3}),
        (lambda: Model(optimizer="groups"), {"algorithm": SCAFFOLD, "precision": "64-true"}),
        (Inplace, {}),
        (Dropping, {}),
        (Tied, {}),
        (lambda: CIFARCNN(num_classes=3, image_size=16), {"data": Images}),
        (Evaluated, {"eval_every_n_rounds": 1}),
        (Smooth, {"engine": "vectorized"}),
        (Dropping, {"engine": "vectorized"}),
        (lambda: CIFARCNN(num_classes=3, image_size=16), {"data": Images, "engine": "vectorized"}),
    ],
)
def test_the_same_numbers(tmp_path, monkeypatch, recordings, model, options):
    compare(tmp_path, monkeypatch, model, **options)
    assert recordings.recorders[0].reason is None
    assert recordings.replays > 5


def test_a_layer_that_torch_may_not_be_able_to_replay(tmp_path, monkeypatch, recordings):
    compare(tmp_path, monkeypatch, Recurrent, eval_every_n_rounds=1)


def test_metrics_of_the_evaluation_leave_recordings_alone(tmp_path, recordings, monkeypatch):
    made = []
    record = step_recorder.record
    monkeypatch.setattr(step_recorder, "record", lambda *args: made.append(args) or record(*args))
    run(tmp_path, Evaluated, eval_every_n_rounds=1, max_rounds=2)
    num_recordings = len(made)
    run(tmp_path, Evaluated, eval_every_n_rounds=1, max_rounds=6)
    assert len(made) - num_recordings <= len(recordings.recorders[1]._counts)


def test_resumed_in_a_process_that_has_recorded_nothing(tmp_path, recordings, monkeypatch):
    whole = run(tmp_path, Model, name="whole", max_rounds=4)
    half = run(tmp_path, Model, name="half", max_rounds=2)
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 30, "mapped": 30})
    torch.manual_seed(0)
    rest = make_trainer(tmp_path, name="half", max_rounds=4, eval_every_n_rounds=0, clients_per_round=4, local_epochs=2)
    rest.fit(Model(), BoringData(), FedAvg(), ckpt_path=Path(half.log_dir, "checkpoints", "last.ckpt"))
    assert_equal_trees(whole.federation.state_dict(), rest.federation.state_dict())


class Indexed(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * (1 + batch_idx % 2)


class Scheduled(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] / (1 + self.current_epoch)


class Stepping(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] / (1 + self.global_step)


class Counting(Model):
    count = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step(batch, batch_idx)["loss"] / self.count


class Nested(Model):
    def __init__(self):
        super().__init__()
        self.state = SimpleNamespace(counts={"steps": 0})

    def training_step(self, batch, batch_idx):
        self.state.counts["steps"] += 1
        return super().training_step(batch, batch_idx)["loss"] / self.state.counts["steps"]


class Keeping(Model):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.outputs.append(loss.detach())
        return loss * len(self.outputs)


class Drawing(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * random.random()


class DrawingArrays(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * float(np.random.rand())


class Branching(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss if loss > 1.1 else loss * 2


class Reading(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * float(batch[0].numpy().max())


class Masking(Model):
    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return functional.cross_entropy(self(inputs[inputs[:, 0] > 0]), targets[inputs[:, 0] > 0])


class Printing(Model):
    def training_step(self, batch, batch_idx):
        print("step", flush=True)
        return super().training_step(batch, batch_idx)


class Measuring(Model):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("train_mean", self.accuracy)
        return super().training_step(batch, batch_idx)


class Hooked(Model):
    def __init__(self):
        super().__init__()
        self.net[0].register_forward_hook(lambda module, args, output: output * 2)


class Skipping(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if len(batch[0]) < 16 else loss


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Indexed, "batch_idx"),
        (Scheduled, r"self\.trainer\.current_epoch"),
        (Stepping, r"self\.trainer\.global_step"),
        (Counting, "changes the module"),
        (Nested, "changes the module"),
        (Keeping, "changes the module"),
        (Drawing, "random"),
        (DrawingArrays, "random"),
        (Branching, "."),
        (Reading, "numpy"),
        (Masking, "depends on values"),
        (Printing, "prints"),
        (Measuring, "updates a torchmetrics Metric"),
        (Hooked, "hooks"),
        (BoringModel, "buffers"),
        (Skipping, "no loss"),
    ],
)
def test_what_is_more_than_a_function_runs_as_written(tmp_path, monkeypatch, recordings, model, reason):
    compare(tmp_path, monkeypatch, model)
    assert recordings.replays == 0 or model is Skipping
    assert re.search(reason, recordings.recorders[0].reason)


FACTOR = [1.0]


class Factored(Model):
    factor = 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * self.factor


class FactoredElsewhere(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * FACTOR[0]


class FactoredByRound(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * self.trainer.current_round


class Rounds(Callback):
    def on_round_start(self, trainer, pl_module):
        FACTOR[0] = float(trainer.current_round)
        if isinstance(pl_module, Factored):
            pl_module.factor = FACTOR[0]


@pytest.mark.parametrize(
    ("model", "reason"), [(Factored, None), (FactoredElsewhere, "has changed"), (FactoredByRound, None)]
)
def test_what_changes_between_rounds(tmp_path, monkeypatch, recordings, model, reason):
    compare(tmp_path, monkeypatch, model, callbacks=[Rounds()])
    assert recordings.replays > 0
    found = recordings.recorders[0].reason
    assert found is None if reason is None else reason in found
