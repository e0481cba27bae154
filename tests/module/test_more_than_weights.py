"""What a module holds beside the weights that training moves: kept, reset or averaged, never lost without a word."""

from __future__ import annotations

import abc
import copy
import random
import re
from collections import deque

import numpy as np
import pytest
import torch
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_model, make_trainer, read_csv
from helpers.modules_with_more import (
    CASES,
    BestSoFar,
    Halving,
    Pretrained,
    Teacher,
    best_so_far,
    evaluations,
    state_of,
    teachers,
)
from helpers.programs import TESTS, run_python
from helpers.user_modules import UserData, _Classifier
from lightning.pytorch import Callback

from fedbc_lightning import FedAvg
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.module.shared_state import Budget
from fedbc_lightning.server import ServerCallback
from fedbc_lightning.state import client_rows


@pytest.mark.distributed
def test_two_processes_end_with_what_one_ends_with(tmp_path):
    done = run_python(["-m", "helpers.modules_with_more", tmp_path], TESTS)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank {rank}.pt", weights_only=True) for rank in (0, 1)]
    assert_equal_trees(*({name: state for name, state in rank.items() if name != "best_so_far"} for rank in ranks))
    for name, case in CASES.items():
        torch.testing.assert_close(ranks[0][name], case(tmp_path / "one" / name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows_in_file", [False, True])
def test_what_is_set_when_the_run_starts_is_the_initial_model(tmp_path, monkeypatch, rows_in_file):
    if rows_in_file:
        monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    ended = []
    for early in (True, False):
        trainer = make_trainer(tmp_path / str(early), max_rounds=2)
        trainer.fit(make_model(Pretrained, early=early), BoringData(), FedAvg())
        ended.append((state_of(trainer), read_csv(trainer.log_dir + "/evaluation.csv")))
    assert_equal_trees(*ended)


def test_what_round_hooks_write_becomes_z(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Halving()], max_rounds=2)
    model = make_model(lr=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.fit(model, BoringData(), FedAvg())
    assert torch.equal(model.net[0].weight, before["net.0.weight"] / 2)
    assert model.net[3].bias.tolist() == [7.0] * 3
    saved = torch.load(trainer.log_dir + "/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert saved["net.3.bias"].tolist() == [7.0] * 3


def test_a_round_that_fails_takes_its_hooks_weights_back(tmp_path):
    class Failing(Halving):
        def on_client_end(self, trainer, pl_module, client):
            if trainer.current_round == 2:
                raise RuntimeError("lost")

    trainer, model = make_trainer(tmp_path, callbacks=[Failing()]), make_model(lr=0.0)
    before = model.net[0].weight.clone()
    with pytest.raises(RuntimeError, match="lost"):
        trainer.fit(model, BoringData(), FedAvg())
    assert torch.equal(model.net[0].weight, before)
    saved = torch.load(trainer.log_dir + "/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["net.0.weight"], before)


def test_a_resumed_run_does_not_take_the_start_again(tmp_path, caplog):
    class Random(Pretrained):
        def fill(self) -> None:
            super().fill()
            torch.nn.init.normal_(self.net[0].weight)
            torch.nn.init.normal_(self.frozen)

    def fit(root, rounds, seed, path=None):
        trainer, model = make_trainer(root, callbacks=[Halving()], max_rounds=rounds), make_model(Random)
        torch.manual_seed(seed)
        trainer.fit(model, BoringData(), FedAvg(), path)
        return state_of(trainer)

    whole = fit(tmp_path / "whole", 3, seed=5)
    fit(tmp_path / "parts", 2, seed=5)
    with caplog.at_level("INFO"):
        assert_equal_trees(fit(tmp_path / "parts", 3, seed=6, path="last"), whole)
    assert "Resumed: the weights and buffers are those of the checkpoint" in caplog.text


def test_a_parameter_that_a_hook_replaces_is_refused(tmp_path):
    class Replacing(Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.net[3] = torch.nn.Linear(8, 3)

    with pytest.raises(ConfigurationError, match=r"parameter 'net\.3\.weight' was replaced by another one"):
        make_trainer(tmp_path, callbacks=[Replacing()]).fit(make_model(), BoringData(), FedAvg())


def test_freezing_in_a_hook_is_refused_before_training(tmp_path):
    class Freezing(BoringModel):
        def on_fit_start(self):
            self.net[0].requires_grad_(False)

        def training_step(self, batch, batch_idx):
            pytest.fail("a step was taken")

    with pytest.raises(ConfigurationError, match=r"requires_grad of 'net\.0\.weight' was changed"):
        make_trainer(tmp_path).fit(make_model(Freezing), BoringData(), FedAvg())


class Thawing(Callback):
    def on_round_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(trainer.current_round == 2)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_thawing_between_rounds_is_refused_by_both_engines(tmp_path, engine):
    model = _Classifier()
    model.net[0].requires_grad_(False)
    with pytest.raises(
        ConfigurationError, match=r"requires_grad of 'net\.0\.weight' was changed.*Freeze or thaw before"
    ):
        make_trainer(tmp_path, clients_per_round=2, callbacks=[Thawing()], engine=engine).fit(
            model, UserData((9, 7)), FedAvg()
        )


class OnlyZ(ServerCallback):
    """A part of one's own that knows nothing of buffers."""

    forms_z = True

    def on_round_start(self, server, sums):
        sums.declare("models", server.z.numel())

    def on_cohort_end(self, cohort, server, sums):
        sums.add_rows("models", cohort.of_valid(cohort.w), cohort.of_valid(cohort.num_samples))

    def on_aggregate(self, server, clients, sums):
        total = sum(record["num_samples"] for record in server.valid_records)
        server.stage("z", sums["models"] / total)


class OwnPart(FedAvg):
    def server_callbacks(self, engine):
        return [OnlyZ()]


@pytest.mark.parametrize("buffers", ["average", "local", "global"])
def test_a_part_of_ones_own_that_stages_z_alone_gets_averaged_buffers(tmp_path, buffers):
    ended = []
    for algorithm in (FedAvg(), OwnPart()):
        trainer = make_trainer(tmp_path / str(algorithm), buffers=buffers)
        trainer.fit(make_model(), BoringData(), algorithm)
        ended.append(state_of(trainer))
    torch.testing.assert_close(*ended, rtol=1e-6, atol=1e-7)
    has_moved = ended[1]["z net.1.running_mean"].abs().max() > 0
    assert has_moved == (buffers != "global")


@pytest.mark.parametrize("buffers", ["average", "local", "global"])
def test_a_teacher_network_travels_as_buffers_do(tmp_path, buffers, caplog):
    """The same numbers as of a module whose teacher is made of buffers, which come in another order."""
    with caplog.at_level("INFO"):
        found = teachers(tmp_path / "parameters", buffers=buffers)
    assert caplog.text.count("training writes 'teacher.weight' and 1 more, which have requires_grad=False") == 1
    expected = teachers(tmp_path / "buffers", as_buffers=True, buffers=buffers)
    for name, value in expected.items():
        other = found[name]
        torch.testing.assert_close(other.sort().values, value.sort().values, rtol=1e-6, atol=1e-7)
    initial = make_model(Teacher).teacher.weight
    assert torch.equal(found["z teacher.weight"], initial) == (buffers == "global")


class AssignedData(Teacher):
    def follow(self, name, mine, target):
        mine.data = torch.lerp(mine.data, target.data, 0.1)


class WrittenThroughData(Teacher):
    def follow(self, name, mine, target):
        mine.data.lerp_(target, 0.1)


class NewParameters(Teacher):
    def follow(self, name, mine, target):
        setattr(self.teacher, name, torch.nn.Parameter(torch.lerp(mine, target, 0.1), requires_grad=False))


@pytest.mark.parametrize("teacher", [AssignedData, WrittenThroughData, NewParameters])
def test_a_teacher_travels_however_it_is_written(tmp_path, teacher):
    """As lightly, MoCo's own code and others write theirs, which torch's version counter does not see."""
    trainer = make_trainer(tmp_path / "found")
    trainer.fit(make_model(teacher), BoringData(), FedAvg())
    expected = teachers(tmp_path / "buffers", as_buffers=True)
    found = state_of(trainer)
    assert_equal_trees(*({name: state[name] for name in expected if name[0] == "z"} for state in (found, expected)))


def test_a_teacher_is_seen_where_no_local_epoch_ends(tmp_path):
    ended = []
    for as_buffers in (False, True):
        states = teachers(tmp_path / str(as_buffers), as_buffers, local_steps=1)
        ended.append({name: value for name, value in states.items() if name[0] == "z"})
    assert_equal_trees(*ended)


def test_a_module_that_training_replaces_is_named(tmp_path, caplog):
    class Replacing(Teacher):
        def training_step(self, batch, batch_idx):
            self.teacher = copy.deepcopy(self.teacher)
            return BoringModel.training_step(self, batch, batch_idx)

    with caplog.at_level("INFO"):
        make_trainer(tmp_path).fit(make_model(Replacing), BoringData(), FedAvg())
    assert "model: teacher (another module now) changed while clients trained" in caplog.text


def test_a_trained_parameter_that_a_step_replaces_is_refused(tmp_path):
    class Replacing(BoringModel):
        def on_train_epoch_start(self):
            self.net[0].weight = torch.nn.Parameter(self.net[0].weight.detach().clone())

    with pytest.raises(ConfigurationError, match=r"'net\.0\.weight' was replaced by another one"):
        make_trainer(tmp_path).fit(make_model(Replacing), BoringData(), FedAvg())


@pytest.mark.parametrize("rows_in_file", [False, True])
def test_a_teacher_network_is_resumed_and_exported(tmp_path, monkeypatch, rows_in_file):
    if rows_in_file:
        monkeypatch.setattr(client_rows, "IN_MEMORY_BELOW", 0)
    whole = teachers(tmp_path / "whole", buffers="local")
    for rounds in (0, 1, 2):
        make_trainer(tmp_path / "parts", max_rounds=rounds, buffers="local", name="a").fit(
            make_model(Teacher), BoringData(), FedAvg(), "last"
        )
    trainer, model = make_trainer(tmp_path / "parts", buffers="local", name="a"), make_model(Teacher)
    trainer.fit(model, BoringData(), FedAvg(), "last")
    assert_equal_trees(state_of(trainer), whole)
    again = make_trainer(tmp_path / "parts", buffers="local", name="a")
    path = again.export(make_model(Teacher), BoringData(), FedAvg(), client=2, out=tmp_path / "m.ckpt")
    exported = Teacher.load_from_checkpoint(path).state_dict()
    row = whole["client 2"]
    flat = torch.cat([exported[name].reshape(-1) for name in ("teacher.weight", "teacher.bias")])
    assert torch.equal(row[-len(flat) :], flat)
    trainer.test(model, BoringData(), FedAvg())  # by what is in memory
    assert_equal_trees(state_of(trainer), whole)


def test_a_plan_and_the_choice_of_an_engine_leave_a_teacher_as_it_is(tmp_path):
    expected = teachers(tmp_path / "one")
    trainer, model = make_trainer(tmp_path / "two", engine="auto"), make_model(Teacher)
    before = model.teacher.weight.clone()
    trainer.plan(model, BoringData(), FedAvg())
    assert torch.equal(model.teacher.weight, before)
    trainer.fit(model, BoringData(), FedAvg())
    assert_equal_trees(state_of(trainer), expected)


def test_a_teacher_that_begins_late_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'teacher.weight' has requires_grad=False and was written for the f"):
        make_trainer(tmp_path).fit(make_model(Teacher, begins_at=2), BoringData(), FedAvg())


class LateTeacher(BoringModel):
    """Its teacher is written between the rounds alone."""

    def __init__(self, *, is_buffer):
        super().__init__()
        teacher = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("teacher", teacher.data) if is_buffer else self.register_parameter("teacher", teacher)

    def on_round_end(self):
        with torch.no_grad():
            self.teacher += 1


def test_a_teacher_that_a_round_hook_writes_is_pointed_to_buffers_before_the_next_training(tmp_path):
    with pytest.raises(ConfigurationError, match=r"'teacher' has .*by a hook such as on_round_end.*register_buffer"):
        make_trainer(tmp_path).fit(make_model(LateTeacher, is_buffer=False), BoringData(), FedAvg())
    model = make_model(LateTeacher, is_buffer=True)
    make_trainer(tmp_path).fit(model, BoringData(), FedAvg())
    assert model.teacher == 3


def test_the_best_value_is_of_each_model_and_client_over_the_evaluations(tmp_path):
    found = best_so_far(tmp_path / "whole")
    accuracy, best = found["pooled"].T
    assert torch.equal(best, accuracy.cummax(0).values)
    assert not torch.equal(best, accuracy)
    columns = list(read_csv(next(tmp_path.rglob("evaluation.csv")))[0])
    rounds = found["clients"].view(5, 6, -1)
    for which in ("global", "local"):
        accuracy, best = (rounds[..., columns.index(f"{name}/{which}")] for name in ("accuracy", "best"))
        assert torch.equal(best, accuracy.cummax(0).values), which
    for rounds in (2, 4):
        trainer = make_trainer(tmp_path / "parts", max_rounds=rounds)
        trainer.fit(make_model(BestSoFar, lr=0.5), BoringData(), FedAvg(), "last")
    assert_equal_trees(evaluations(trainer), found)


class SwapsWeights(Callback):
    """Puts other weights in for the evaluation, as callbacks do that keep a mean of the weights."""

    def on_validation_start(self, trainer, pl_module):
        self.kept = {name: value.clone() for name, value in pl_module.state_dict().items()}
        if trainer.current_round:
            pl_module.load_state_dict({name: value * 2 for name, value in self.kept.items()})

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.kept)


def test_weights_that_are_swapped_for_an_evaluation_are_not_measured_and_one_line_says_so(tmp_path, caplog):
    found = []
    with caplog.at_level("INFO"):
        for callbacks in ([SwapsWeights()], []):
            trainer = make_trainer(tmp_path / str(len(callbacks)), callbacks=callbacks)
            trainer.fit(make_model(), BoringData(), FedAvg())
            found.append([trainer.callback_metrics["loss/global"], trainer.federation.server.z])
    assert_equal_trees(*found)
    said = "on_validation_start wrote into weights or buffers: that is neither evaluated nor kept"
    assert caplog.text.count(said) == 1


def test_writes_at_the_end_of_an_evaluation_are_named(tmp_path, caplog):
    class Zeroing(Callback):
        def on_validation_end(self, trainer, pl_module):
            pl_module.net[0].weight.data.zero_()

    with caplog.at_level("INFO"):
        make_trainer(tmp_path, callbacks=[Zeroing()]).fit(make_model(), BoringData(), FedAvg())
    assert caplog.text.count("on_validation_end wrote into weights or buffers") == 1


class Averaging(torch.optim.SGD):
    """Holds other weights in training than in evaluation, as schedule-free optimizers do."""

    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach() / 2
        return result

    def eval(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if "slow" in self.state[parameter]:
                    parameter.data.copy_(self.state[parameter]["slow"])


class WithHooks(BoringModel):
    """Writes down which hooks it hears, the round, whether it is in evaluation, and whether it holds z."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.heard: list = []
        self.cleared: list = []

    def configure_optimizers(self):
        return Averaging(self.parameters(), self.hparams["lr"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def hear(self, name):
        self.optimizers().eval()
        z = self.trainer_of_run.federation.server.staged("z")
        holds_z = torch.equal(torch.nn.utils.parameters_to_vector(self.parameters()), z)
        self.heard.append((self.trainer_of_run.current_round, name, self.training, torch.is_grad_enabled(), holds_z))

    def on_validation_model_zero_grad(self):
        self.cleared.append(self.trainer.current_round)

    def configure_sharded_model(self):
        self.cleared.append("configured")

    def on_validation_model_eval(self):
        self.hear("model_eval")

    def on_validation_start(self):
        self.hear("start")

    def on_validation_end(self):
        self.hear("end")

    def on_validation_model_train(self):
        self.hear("model_train")


class Listening(Callback):
    def on_validation_start(self, trainer, pl_module):
        pl_module.hear("callback start")

    def on_validation_epoch_start(self, trainer, pl_module):
        pl_module.hear("callback epoch_start")

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.hear("callback epoch_end")
        pl_module.log("of_callback", 3.0)

    def on_validation_end(self, trainer, pl_module):
        pl_module.hear("callback end")

    def on_sanity_check_start(self, trainer, pl_module):
        raise AssertionError("there is none")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["of_callback"] = trainer.current_round

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.loaded = checkpoint["of_callback"]


def test_hooks_around_an_evaluation_are_called_once_with_z(tmp_path):
    callback, model = Listening(), make_model(WithHooks)
    trainer = make_trainer(tmp_path, max_rounds=2, eval_every_n_rounds=2, callbacks=[callback])
    model.trainer_of_run = trainer
    trainer.fit(model, BoringData(500, val_fraction=0.25), FedAvg())
    assert model.cleared == ["configured", 2]  # gradients are cleared after training, as in Lightning
    order = [
        "model_eval",
        "callback start",
        "start",
        "callback epoch_start",
        "callback epoch_end",
        "end",
        "model_train",
    ]
    for round in (0, 2):
        heard = [entry for entry in model.heard if entry[0] == round]
        assert [name for _, name, *_ in heard] == [*order, "callback end"]
        assert all(holds_z for *_, holds_z in heard)
        assert not any(training or grad for _, name, training, grad, _ in heard if name in order[1:-1])
    rows = read_csv(trainer.log_dir + "/metrics.csv")
    assert [row["of_callback"] for row in rows] == ["3.0", "", "3.0"]

    plain = make_trainer(tmp_path / "plain", max_rounds=2)
    quiet = make_model(WithHooks)
    quiet.hear = lambda name: None
    plain.fit(quiet, BoringData(500, val_fraction=0.25), FedAvg())
    assert_equal_trees(state_of(trainer), state_of(plain))

    again = Listening()
    model.trainer_of_run = make_trainer(tmp_path, max_rounds=3, eval_every_n_rounds=2, callbacks=[again])
    model.trainer_of_run.fit(model, BoringData(500, val_fraction=0.25), FedAvg(), "last")
    assert again.loaded == 2


class Ema:
    """An average of the weights, written as torch-ema writes its own."""

    def __init__(self, parameters):
        self.shadow = [parameter.detach().clone() for parameter in parameters]

    def update(self, parameters):
        for shadow, parameter in zip(self.shadow, parameters, strict=True):
            shadow.data.lerp_(parameter.detach(), 0.1)


class Remembering(BoringModel):
    """Holds one kind of state, which its step changes."""

    def __init__(self, kind="nothing", resets=False):
        super().__init__()
        self.kind, self.sizes, self.net[2].slope = kind, [1, 2], 0.5
        states = {
            "number": lambda: 0, "list": list, "deque": lambda: deque(maxlen=3), "dict": lambda: {"a": {"b": 0}},
            "tensor": lambda: torch.zeros(2), "ema": lambda: Ema(self.parameters()),
            "hidden": lambda: [torch.nn.Linear(2, 2)], "own": lambda: [self.net, *self.parameters()],
            "torch": torch.Generator, "numpy": lambda: np.random.default_rng(0), "random": lambda: random.Random(0),
        }  # fmt: skip
        self.state = states[kind]() if kind in states else None
        if resets:
            self.on_client_start = lambda client: None

    def training_step(self, batch, batch_idx):
        changes = {
            "number": lambda: setattr(self, "state", self.state + 1), "list": lambda: self.state.append(1),
            "deque": lambda: self.state.append(batch_idx), "dict": lambda: self.state["a"].update(b=batch_idx + 1),
            "tensor": lambda: self.state.data.add_(1), "ema": lambda: self.state.update(self.parameters()),
            "torch": lambda: torch.rand(1, generator=self.state), "numpy": lambda: self.state.random(),
            "random": lambda: self.state.random(), "child": lambda: setattr(self.net[2], "slope", 0.1),
            "hidden": lambda: self.state[0].weight.data.add_(1),
            "cleared": lambda: self.sizes.append(3) or self.sizes.pop(),
        }  # fmt: skip
        changes.get(self.kind, int)()
        return super().training_step(batch, batch_idx)


def lines_about_state(tmp_path, caplog, model):
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, max_rounds=2, eval_every_n_rounds=0).fit(model, BoringData(500), FedAvg())
    lines = [line for line in caplog.text.splitlines() if "is neither parameter nor buffer" in line]
    caplog.clear()
    return lines


def test_state_that_clients_share_is_said_once(tmp_path, caplog):
    for kind in ("number", "list", "deque", "dict", "tensor", "ema", "hidden", "torch", "numpy", "random"):
        (line,) = lines_about_state(tmp_path, caplog, make_model(Remembering, kind=kind))
        assert "model: state changed while clients trained" in line, kind
    (line,) = lines_about_state(tmp_path, caplog, make_model(Remembering, kind="child"))
    assert "model: net.2.slope changed" in line
    for kind, resets in (("nothing", False), ("own", False), ("cleared", False), ("number", True)):
        assert not lines_about_state(tmp_path, caplog, make_model(Remembering, kind=kind, resets=resets)), kind


def test_objects_without_attributes_are_described_alike_in_every_round():
    parts = [vars(abc.ABC)["_abc_impl"], object(), re.compile("a")]  # C code holds what they know
    assert Budget().describe(parts) == tuple(map(id, parts))
