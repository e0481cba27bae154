"""Recorded steps: the numbers of the module's own step bit for bit; what is more than a function is not recorded."""

import functools
import os
import re
from types import SimpleNamespace

import pytest
import torch
from fedbc_lightning.models import CIFARCNN, LogisticRegression
from helpers import steps
from helpers.boring import BoringData, BoringModel
from helpers.steps import Branching, Centering, Dropping, Images, Listed, LogsTheMost, Measuring, Recurrent, Smooth
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from fedbc_lightning import SCAFFOLD, ConfigurationError, FedBC, recordable
from fedbc_lightning.engines.recorded import step_recorder
from fedbc_lightning.engines.recorded.step_recorder import StepRecorder


class Inplace(Smooth):
    def make_middle(self):
        return nn.ReLU(inplace=True)


class Tied(Smooth):
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


class TwoNames(Smooth):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.head = self.net[2]
        self.whole = nn.Sequential(self.net[0], self.net[1], self.head)

    def forward(self, inputs):
        return self.whole(inputs)


class Prior(Smooth):
    """An attribute made in inference mode."""

    def __init__(self):
        super().__init__()
        with torch.inference_mode():
            self.prior = torch.full((3,), 0.3)


class Masked(Smooth):
    """A non-persistent buffer, and constants of torch's default dtype."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(10), persistent=False)

    def training_step(self, batch, batch_idx):
        shift = torch.linspace(0, 1, 10) / 3 + torch.full((10,), 0.1)
        return super().training_step([batch[0] * self.mask + shift, batch[1]], batch_idx)


class Logged(Smooth):
    """Logs its loss, and then adds to it in place."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_before", loss)
        loss += 0.5 * self.net[0].weight.square().sum()
        return loss


class Weighted(Smooth):
    """Logs with a batch size that is a tensor."""

    def training_step(self, batch, batch_idx):
        self.log("train_mean", batch[0].mean(), batch_size=(batch[1] == 1).sum())
        return super().training_step(batch, batch_idx)


@pytest.fixture
def recordings(monkeypatch):
    """Recorders that record the second step of a shape; what they recorded, and where they gave up."""
    seen = SimpleNamespace(recorders=[], recorded=0, replays=0)
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    make, record = StepRecorder.__init__, step_recorder.record

    def make_seen(self, *args, **options):
        make(self, *args, **options)
        seen.recorders.append(self)

    def record_seen(*args, **options):
        seen.recorded += 1
        replay, draws = record(*args, **options)

        def count(*tensors):
            seen.replays += 1
            return replay(*tensors)

        return count, draws

    monkeypatch.setattr(StepRecorder, "__init__", make_seen)
    monkeypatch.setattr(step_recorder, "record", record_seen)
    return seen


def run(root, model, *arguments, **options):
    return steps.fit(root, model, *arguments, **{"clients_per_round": 4, "record_steps": True} | options)


def compare(root, monkeypatch, model, *arguments, **options):
    """The run as it is against one in which no step is recorded: the state and the tables, bit for bit."""
    recorded = run(root, model, *arguments, name="recorded", **options)
    with monkeypatch.context() as patch:
        patch.setattr(step_recorder, "RECORD_AFTER", {"single": 10**9, "mapped": 10**9})
        steps.assert_same_run(recorded, run(root, model, *arguments, name="written", **options))
    return recorded


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (lambda: LogsTheMost("adam"), {"algorithm": lambda: FedBC(dual_lr=0.1), "gradient_clip_val": 0.3}),
        (lambda: LogsTheMost("groups"), {"algorithm": SCAFFOLD, "precision": "64-true"}),
        (LogsTheMost, {"local_epochs": None, "local_steps": 23, "max_rounds": 3}),
        (Inplace, {}),
        (Dropping, {}),
        (Tied, {}),
        (Recurrent, {"eval_every_n_rounds": 1}),
        (TwoNames, {}),
        (Prior, {}),
        (Masked, {"precision": "64-true"}),
        (Logged, {}),
        (lambda: CIFARCNN(num_classes=3, image_size=16), {"data": Images, "max_rounds": 1}),
        (Evaluated, {"eval_every_n_rounds": 1}),
        (Smooth, {"engine": "vectorized"}),
        (TwoNames, {"engine": "vectorized", "eval_every_n_rounds": 1}),
        (Dropping, {"engine": "vectorized"}),
        (BoringModel, {"buffers": "local"}),
        (BoringModel, {"engine": "vectorized"}),
        (BoringModel, {"precision": "bf16-mixed"}),
        (Smooth, {"precision": "bf16-true"}),
        (Smooth, {"engine": "vectorized", "precision": "bf16-mixed"}),
    ],
)
def test_the_same_numbers(tmp_path, monkeypatch, recordings, model, options):
    compare(tmp_path, monkeypatch, model, **options)
    if model is not Recurrent:  # not every torch can replay an LSTM
        assert recordings.recorders[0].reason is None
        assert recordings.replays > 3
    if model is Evaluated:  # whose Metric, moved in each evaluation, makes nothing be recorded again
        assert recordings.recorded <= len(recordings.recorders[0]._counts)


def test_resumed_in_a_process_that_has_recorded_nothing(tmp_path, recordings, monkeypatch):
    whole = run(tmp_path, Smooth, name="whole", max_rounds=4)
    run(tmp_path, Smooth, name="half", max_rounds=2)
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 30, "mapped": 30})
    steps.assert_same_run(whole, run(tmp_path, Smooth, name="half", max_rounds=4, ckpt_path="last"))


class Reading(Smooth):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float(batch[0].numpy().max())


class Masking(Smooth):
    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return functional.cross_entropy(self(inputs[inputs[:, 0] > 0]), targets[inputs[:, 0] > 0])


class Writing(Smooth):
    """Changes a part of its batch in place."""

    def training_step(self, batch, batch_idx):
        batch[0][:, :3] *= 0.5
        return super().training_step(batch, batch_idx)


class Hooked(Smooth):
    def __init__(self):
        super().__init__()
        self.net[0].register_forward_hook(lambda module, args, output: output * 2)


class Remembering(Smooth):
    """Keeps something of its last batch, which a trace would replace by a tensor without values."""

    kept = torch.ones(())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.kept.sign()
        self.kept = batch[0].detach().square().mean()
        return loss


class MeasuringInADict(Smooth):
    """Its Metric is reset in each step, and no part of the module for torch."""

    def __init__(self):
        super().__init__()
        self.held = {"accuracy": MulticlassAccuracy(3)}

    def training_step(self, batch, batch_idx):
        self.held["accuracy"].update(self(batch[0]), batch[1])
        self.log("train_measured", self.held["accuracy"].compute())
        self.held["accuracy"].reset()
        return super().training_step(batch, batch_idx)


class Skipping(Smooth):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if len(batch[0]) < 16 else loss


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Branching, "looks at values"),
        (Reading, "looks at values"),
        (Masking, "depends on values"),
        (Weighted, "batch_size that is a tensor"),
        (Measuring, "updates a torchmetrics Metric"),
        (Centering, "makes the buffer 'center'"),
        (Hooked, "hooks"),
        (Skipping, "no loss"),
        (Listed, "outside of its own modules"),
        (Writing, "writes into"),
        (Remembering, "changes what the module holds"),
        (MeasuringInADict, "depends on values|looks at values|changes what the module holds"),
    ],
)
def test_what_torch_cannot_record_runs_as_written(tmp_path, monkeypatch, recordings, caplog, model, reason):
    caplog.set_level("INFO")
    compare(tmp_path, monkeypatch, model)
    assert recordings.replays == 0 or model is Skipping
    assert re.search(reason, recordings.recorders[0].reason)
    if model is Measuring:
        (line,) = [record.message for record in caplog.records if "ordinary speed" in record.message]
        assert "Numbers stay the same and you need do nothing" in line


# the promise


class Promised(Smooth):
    @recordable
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class Inherited(Promised):
    """Changes nothing that a step calls."""

    def on_fit_start(self):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class OwnLayers(Promised):
    """Its layers may keep state, which the base class cannot know."""

    def __init__(self):
        super().__init__()
        self.net[1] = nn.ReLU()


class PromisedAnew(OwnLayers):
    training_step = recordable(Promised.training_step)


class Overridden(Promised):
    def forward(self, inputs):
        return super().forward(inputs)


class Wrapped(Promised):
    training_step = functools.wraps(Promised.training_step)(lambda *args: Promised.training_step(*args))


class Replacing(Callback):
    def on_round_start(self, trainer, pl_module):
        if trainer.current_round == 2:
            pl_module.training_step = lambda batch, batch_idx: 2 * Smooth.training_step(pl_module, batch, batch_idx)


@pytest.mark.parametrize(
    ("model", "is_recorded"),
    [
        (Inherited, True),
        (OwnLayers, False),
        (PromisedAnew, True),
        (lambda: LogisticRegression(10, 3), True),
        (Smooth, False),
        (Overridden, False),
        (Wrapped, False),
    ],
)
def test_the_promise_is_given_by_the_decorator(tmp_path, recordings, model, is_recorded):
    run(tmp_path, model, record_steps="auto", max_rounds=2)
    assert (recordings.replays > 3) == is_recorded
    assert recordings.recorders[0].lacks_promise != is_recorded


def test_a_step_that_is_replaced_on_the_module_is_taken(tmp_path, monkeypatch, recordings):
    compare(tmp_path, monkeypatch, Promised, callbacks=[Replacing()])


def test_a_line_says_once_what_a_promise_would_save(tmp_path, caplog, recordings, monkeypatch):
    monkeypatch.setattr(step_recorder, "SHORT_STEP", {"cpu": 60.0})
    with caplog.at_level("INFO"):
        run(tmp_path, Smooth, record_steps="auto")
    (line,) = [record.message for record in caplog.records if "promise that" in record.message]
    assert re.search(
        r"^Smooth\.training_step: a step takes [\d.]+ ms, .*fedbc_lightning\.recordable.*record_steps: true", line
    )


class FactoredByRound(Smooth):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.trainer.current_round


class FactoredByClass(Smooth):
    def on_round_start(self):
        type(self).factor = self.trainer.current_round

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor


@pytest.mark.parametrize("model", [FactoredByRound, FactoredByClass])
@pytest.mark.filterwarnings("ignore:.*something else than when it was recorded")
def test_what_changes_between_rounds_is_found_before_a_replay(tmp_path, monkeypatch, recordings, model):
    compare(tmp_path, monkeypatch, model)
    assert recordings.replays > 0
    assert "other numbers" in recordings.recorders[0].reason


def test_a_change_that_nobody_could_see_is_found_and_said(tmp_path, recordings, monkeypatch):
    """Known from the first comparison after it, though the promise was broken."""
    monkeypatch.setenv("FACTOR", "1")

    class Hidden(Smooth):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float(os.environ["FACTOR"])

    class Changing(Callback):
        def on_round_end(self, trainer, pl_module):
            monkeypatch.setenv("FACTOR", str(max(trainer.current_round - 1, 1)))

    with pytest.warns(UserWarning, match="Hidden.training_step does something else than when it was recorded"):
        run(tmp_path, Hidden, max_rounds=6, callbacks=[Changing()], record_steps=True)
    assert "other numbers" in recordings.recorders[0].reason


class Even(BoringData):
    """All batches have one size: two in each epoch."""

    def client_train_dataset(self, client):
        inputs, targets = self.arrays[1]
        return TensorDataset(inputs[:32], targets[:32])


@pytest.mark.parametrize("rounds", [1, 16])
def test_steps_are_compared_rarely_in_the_end(tmp_path, recordings, monkeypatch, rounds):
    """Three, then one in four until six were compared, then one in 16, however many rounds that are."""
    for name, value in {"COMPARE_EVERY": 4, "COMPARE_RARELY": 16, "NUM_OFTEN": 6}.items():
        monkeypatch.setattr(step_recorder, name, value)
    run(tmp_path, Smooth, data=Even, clients_per_round=1, max_rounds=rounds, local_epochs=32 // rounds)
    (recording,) = recordings.recorders[0]._found.values()
    assert recordings.replays == 63
    assert recording.num_compared == 9


class Norms(Callback):
    """Looks at the gradients that a round leaves."""

    def __init__(self):
        self.found = []

    def on_round_end(self, trainer, pl_module, *args):
        self.found.append([float(parameter.grad.norm()) for parameter in pl_module.parameters()])


def test_callbacks_find_the_gradients_of_the_last_step(tmp_path, recordings):
    norms = [Norms(), Norms()]
    run(tmp_path, Smooth, callbacks=norms[:1], record_steps=False)
    assert recordings.recorded == 0
    run(tmp_path, Smooth, callbacks=norms[1:])
    assert norms[0].found == norms[1].found


class Late(Callback):
    """Puts a hook on a weight in the third round."""

    def __init__(self):
        self.calls = 0

    def on_round_start(self, trainer, pl_module, *args):
        if trainer.current_round == 3:
            pl_module.net[0].weight.register_hook(self.count)

    def count(self, gradient):
        self.calls += 1


def test_a_hook_that_comes_late_is_called(tmp_path, recordings):
    calls = []
    for record in (False, True):
        late = Late()
        run(tmp_path, Smooth, callbacks=[late], record_steps=record, max_rounds=3)
        calls.append(late.calls)
    assert calls[0] == calls[1] > 0
    assert recordings.replays > 0
    with pytest.raises(ConfigurationError, match="hooks on its layers or parameters"):
        run(tmp_path, Smooth, callbacks=[Late()], engine="vectorized", max_rounds=3)
