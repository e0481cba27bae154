"""Compiled steps: the recorded ones but for last digits; what is not compiled, or compiled wrongly, is replayed."""

import shutil
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.boring import BoringData, BoringModel, assert_equal_trees, make_trainer
from torch import nn
from torch.nn import functional

from fedbc_lightning import SCAFFOLD, ConfigurationError, FedAvg, FedBC
from fedbc_lightning.engines.recorded import compiled, step_recorder
from fedbc_lightning.federation.checkpoint_content import state_of


class Model(BoringModel):
    """Logs a tensor of another dtype; its ReLU works in place."""

    def __init__(self, **settings):
        super().__init__()
        self.settings = settings
        self.net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.log("train_hits", (outputs.argmax(1) == batch[1]).sum(), reduce_fx="max")
        return functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, **self.settings)


class Diverging(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e12)


class Hooked(Model):
    def on_train_batch_end(self, *args):
        """Is called after each step."""


class Adaptive(Model):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Dropping(Model):
    def forward(self, inputs):
        return functional.dropout(self.net(inputs), 0.1)


class Changing(Model):
    """Gives a setting of the optimizer another value in each second round."""

    def __init__(self, name, values):
        super().__init__()
        self.name, self.values = name, values

    def configure_optimizers(self):
        setting = {self.name: self.values[self.trainer.current_round % 2]}
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5, **setting)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Record the second step of a form, and compile its fifth replay."""
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 2, "mapped": 2})
    monkeypatch.setattr(compiled, "COMPILE_AFTER", (5,) * 4)


@pytest.fixture
def calls(monkeypatch):
    """Compile nothing: run the loop that would be compiled. What was called, and what a call does beside it."""
    seen = SimpleNamespace(num_calls=0, num_steps=0, beside=lambda tensors: None)

    def compile_graph(function, inputs):
        def call(tensors):
            seen.num_calls += 1
            seen.num_steps += int(tensors[0])
            function(*tensors)
            seen.beside(tensors)

        return call

    monkeypatch.setattr(compiled, "compile_graph", compile_graph)
    return seen


def run(folder, record_steps, model=Model, algorithm=FedAvg, **options):
    settings = {"max_rounds": 2, "local_epochs": 8, "engine": "sequential", "seed": 0, **options}
    trainer = make_trainer(folder, name=record_steps, record_steps=record_steps, **settings)
    torch.manual_seed(0)
    trainer.fit(model(), BoringData(), algorithm())
    return state_of(trainer.federation)


def spied(function, results):
    def call(*args):
        results.append(function(*args))
        return results[-1]

    return call


def assert_near(found, expected, tolerance):
    for a, b in zip(tensors_in(found), tensors_in(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        yield from tensors_in(value)


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        ({}, SCAFFOLD),
        ({"momentum": 0.5, "maximize": True}, FedAvg),
        ({"momentum": 0.5, "nesterov": True, "weight_decay": 0.1}, partial(FedBC, dual_lr=0.1)),
    ],
)
def test_a_compiled_step_is_the_recorded_one(tmp_path, calls, settings, algorithm):
    model = partial(Model, **settings)
    expected = run(tmp_path, "auto", model, algorithm, precision="64-true")
    assert not calls.num_calls
    found = run(tmp_path, "compile", model, algorithm, precision="64-true")
    assert calls.num_steps > 2 * calls.num_calls > 0
    assert_near(found, expected, 1e-12)


@pytest.mark.parametrize(
    ("name", "values"), [("weight_decay", (0.1, 0.0)), ("nesterov", (False, True)), ("maximize", (False, True))]
)
def test_a_setting_that_changes_which_operations_a_step_has_is_compiled_anew(tmp_path, calls, name, values):
    model, options = partial(Changing, name, values), {"precision": "64-true", "max_rounds": 3}
    expected = run(tmp_path, "auto", model, **options)
    found = run(tmp_path, "compile", model, **options)
    assert calls.num_calls
    assert_near(found, expected, 1e-12)


@pytest.mark.parametrize(
    ("place", "error"), [(2, 1e-4), (3, 1e-4), (6, 1e-3), (7, 1)], ids=["w", "momentum", "loss", "logged"]
)
def test_wrong_numbers_are_found_at_the_first_use(tmp_path, calls, place, error):
    model = partial(Model, momentum=0.5)
    expected = run(tmp_path, "auto", model)
    calls.beside = lambda tensors: tensors[place].add_(error)
    with pytest.warns(UserWarning, match="other numbers than recorded\\."):
        found = run(tmp_path, "compile", model)
    assert calls.num_calls == 1
    assert_equal_trees(found, expected)


def test_a_loop_that_goes_wrong_from_its_second_step_on_is_found_at_the_first_use(tmp_path, calls):
    expected = run(tmp_path, "auto")
    calls.beside = lambda tensors: tensors[2].mul_(1.01) if int(tensors[0]) > 1 else None
    with pytest.warns(UserWarning, match="other numbers than recorded\\."):
        found = run(tmp_path, "compile")
    assert_equal_trees(found, expected)


def test_clients_that_diverge_end_as_they_do_without_compiling(tmp_path, calls):
    with pytest.raises(ConfigurationError, match="of all 2 sampled clients became NaN or infinite"):
        run(tmp_path, "compile", Diverging, clients_per_round=2)
    assert calls.num_calls


def test_wrong_numbers_are_found_later(tmp_path, calls):
    calls.beside = lambda tensors: tensors[2].mul_(1.0001) if calls.num_steps > 20 else None
    with pytest.warns(UserWarning, match="steps since the comparison before this one, at most a round ago, may be"):
        run(tmp_path, "compile")


def test_without_a_compiler_a_line_says_so(tmp_path, monkeypatch):
    def compile_graph(function, inputs):
        raise RuntimeError("No working C++ compiler found")

    expected = run(tmp_path, "auto")
    monkeypatch.setattr(compiled, "compile_graph", compile_graph)
    with pytest.warns(UserWarning, match=r"compiling failed \(.*No working C\+\+ compiler found\); it needs") as told:
        found = run(tmp_path, "compile")
    assert len(told) == 1
    assert_equal_trees(found, expected)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (Adaptive, {}, "only steps of SGD"),
        (Model, {"gradient_clip_val": 0.1}, "only steps of SGD"),
        (Dropping, {}, "random numbers"),
        (Hooked, {}, "hooks of steps"),
        (Model, {"local_parameters": ["net.2.*"]}, "all optimized and shared"),
    ],
)  # fmt: skip
def test_other_steps_are_replayed_and_a_line_says_so(tmp_path, calls, model, options, reason):
    expected = run(tmp_path, "auto", model, **options)
    with pytest.warns(UserWarning, match=reason) as told:
        found = run(tmp_path, "compile", model, **options)
    assert (len(told), calls.num_calls) == (1, 0)
    assert_equal_trees(found, expected)


def test_the_vectorized_engine_does_not_compile(tmp_path):
    with pytest.raises(ConfigurationError, match="compile is for engine: sequential"):
        make_trainer(tmp_path, record_steps="compile", engine="vectorized")


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler, such as g++")
def test_inductor_compiles_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "COMPILE_AFTER", (5,))  # one form alone, because to compile takes seconds
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # Inductor sets it
    made = []
    monkeypatch.setattr(compiled.CompiledStep, "is_right", spied(compiled.CompiledStep.is_right, made))
    model, algorithm = partial(Model, momentum=0.5), partial(FedBC, dual_lr=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of Inductor's imports
        found = run(tmp_path, "compile", model, algorithm)
    assert made
    assert all(made)
    assert_near(found, run(tmp_path, "auto", model, algorithm), 1e-4)
