"""What a step must not see, what changes between steps, and who listens: no recorded or mapped step overlooks it."""

import types

import pytest
import torch
from helpers.boring import BoringData, Hidden, assert_equal_trees, make_trainer
from helpers.standing_steps import CHANGED, REFUSED, Dispatching, Saving
from helpers.stateful_steps import Plain
from lightning.pytorch import Callback
from test_proof import proof_of
from torch import nn
from torch.nn import functional

from fedbc_lightning import ConfigurationError, FedAvg
from fedbc_lightning.engines.recorded import step_recorder
from fedbc_lightning.engines.recorded.recording import NotRecordableError


@pytest.mark.parametrize("name", REFUSED)
def test_a_weight_is_nothing_but_its_values(name):
    with pytest.raises(NotRecordableError):
        proof_of(Plain(REFUSED[name]))


@pytest.mark.parametrize("name", CHANGED)
def test_a_proof_ends_with_what_stands_elsewhere(name):
    way, change = CHANGED[name]
    proof, before = proof_of(Plain(way)), way(None)
    assert proof.holds()
    change()
    assert way(None) != before
    assert not proof.holds()


LISTENERS = {
    "a function mode": Saving,
    "a dispatch mode": Dispatching,
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda it: it),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", LISTENERS)
def test_nothing_is_proven_while_somebody_listens(name):
    proof = proof_of(Plain())
    with LISTENERS[name](), pytest.raises(NotRecordableError, match="listens"):
        proof_of(Plain())
    with LISTENERS[name]():
        assert not proof.holds()


def test_a_replaced_method_of_tensors_is_noticed(monkeypatch):
    proof = proof_of(Plain(lambda module: module.net[0].weight.norm()))
    norm = torch.Tensor.norm
    monkeypatch.setattr(torch.Tensor, "norm", lambda tensor: norm(tensor))
    assert not proof.holds_for_torch()
    with pytest.raises(NotRecordableError, match="replaced"):
        proof_of(Plain(lambda module: module.net[0].weight.norm()))


def test_a_function_that_a_package_adds_to_all_modules_replaces_nothing(monkeypatch):
    # transformers does so with the first model that it builds
    monkeypatch.setattr(nn.Module, "smart_apply", lambda module, change: change(module), raising=False)
    assert proof_of(Plain(lambda module: module.net[0].weight.norm())).holds()


def test_a_function_that_a_package_adds_is_looked_through_where_a_step_calls_it(monkeypatch):
    seen = []
    monkeypatch.setattr(nn.Module, "size", lambda module: seen.append(1) or module.net[0].weight.norm(), raising=False)
    with pytest.raises(NotRecordableError, match="changes `seen`"):
        proof_of(Plain(lambda module: module.size()))
    assert not seen


@pytest.mark.parametrize("name", ["__getattribute__", "_call_impl", "forward"])
def test_a_function_of_all_modules_that_python_or_torch_asks_for_is_no_addition(monkeypatch, name):
    original = getattr(nn.Module, name)
    monkeypatch.setattr(nn.Module, name, lambda *args, **options: original(*args, **options), raising=False)
    with pytest.raises(NotRecordableError, match="replaced"):
        proof_of(Plain(lambda module: module.net[0].weight.norm()))


def test_a_module_that_is_called_torch_something_is_not_torch(monkeypatch):
    patches = types.ModuleType("torch_patches")
    exec("from torch.nn.functional import relu as inner\ndef relu(x):\n    return inner(x)", vars(patches))
    monkeypatch.setattr(functional, "relu", patches.relu)
    with pytest.raises(NotRecordableError, match="replaced"):
        proof_of(Plain(lambda module: functional.relu(module.net[0].weight).sum()))


def test_a_layer_of_torch_with_a_property_of_somebody_else_is_no_layer(monkeypatch):
    seen = []
    slope = property(lambda layer: seen.append(1) or 0.1, lambda layer, value: None)
    monkeypatch.setattr(nn.LeakyReLU, "negative_slope", slope, raising=False)
    module = Plain(lambda module: module.activation(module.net[0].weight).sum())
    module.activation = nn.LeakyReLU()
    with pytest.raises(NotRecordableError):
        proof_of(module)
    assert not seen


# whole runs


class Logged(Plain):
    """Logs its loss, and then adds to it in place."""

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_before", loss)
        loss += 0.5 * self.net[0].weight.square().sum()
        return loss


class Weighted(Plain):
    """Logs with a batch size that is a tensor."""

    def training_step(self, batch, batch_idx):
        self.log("train_mean", batch[0].mean(), batch_size=(batch[1] == 1).sum())
        return functional.cross_entropy(self(batch[0]), batch[1])


class Listed(Plain):
    """Is pulled to where it began, by a list of its parameters: at the start this has no gradient."""

    def __init__(self):
        super().__init__()
        self.tracked = list(self.net.parameters())
        self.anchor = [parameter.detach().clone() for parameter in self.tracked]

    def training_step(self, batch, batch_idx):
        pull = sum((a - b).square().sum() for a, b in zip(self.tracked, self.anchor, strict=True))
        return functional.cross_entropy(self(batch[0]), batch[1]) + pull


class Moving(Plain):
    """Multiplies its loss by a number that others change between steps."""

    factor, count = 1.0, 0

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1]) * self.factor

    def move(self, *args):
        self.count += 1
        self.factor = 1.0 if self.count % 8 < 6 else 0.2
        return 1.0


class Annealed(Moving):
    """A scheduler's function changes what the step reads."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.move)]


class Hooked(Moving):
    """A hook of the optimizer does."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *args: self.move() and None)
        return optimizer


class Transferred(Moving):
    """A hook that transfers batches does."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.move()
        return batch


class Late(Callback):
    """Puts a hook on a weight after the first round."""

    def __init__(self):
        self.calls = 0

    def on_round_start(self, trainer, pl_module, *args):
        if trainer.current_round == 1:
            pl_module.net[0].weight.register_hook(self.count)

    def count(self, gradient):
        self.calls += 1


def run(tmp_path, model, data=BoringData, callbacks=(), **options):
    torch.manual_seed(0)
    module = model()
    options = {"eval_every_n_rounds": 0, "clients_per_round": 2, "max_rounds": 2, "local_epochs": 2, **options}
    trainer = make_trainer(tmp_path, callbacks=list(callbacks), **options)
    trainer.fit(module, data(batch_size=8), FedAvg())
    metrics = trainer.callback_metrics.items()
    return dict(module.state_dict()), {key: float(value) for key, value in metrics if not key.startswith("time/")}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 3, "mapped": 2})


@pytest.mark.parametrize("model", [Logged, Weighted, Annealed, Hooked, Transferred])
def test_recorded_runs_have_the_numbers_of_the_step_as_written(tmp_path, model):
    written = run(tmp_path / "written", model, record_steps=False)
    assert_equal_trees(run(tmp_path / "recorded", model), written)


def test_mapped_runs_log_what_was_logged(tmp_path):
    written, mapped = (run(tmp_path / e, Logged, engine=e)[1] for e in ("sequential", "vectorized"))
    assert written.keys() == mapped.keys()
    assert mapped["train/before"] == pytest.approx(written["train/before"], rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"engine": "vectorized"}], ids=["sequential", "vectorized"])
def test_a_list_of_parameters_is_no_way_around_the_arguments(tmp_path, options):
    if not options:
        assert_equal_trees(run(tmp_path, Listed), run(tmp_path, Listed, record_steps=False))
        return
    with pytest.raises(ConfigurationError, match="holds outside of its own modules"):
        run(tmp_path, Listed, **options)


def test_a_hook_that_comes_late_is_called(tmp_path):
    calls = []
    for name, record in (("written", False), ("recorded", "auto")):
        late = Late()
        run(tmp_path / name, Plain, callbacks=[late], record_steps=record, max_rounds=3)
        calls.append(late.calls)
    assert calls[0] == calls[1] > 0
    with pytest.raises(ConfigurationError, match="hooks are registered"):
        run(tmp_path / "mapped", Plain, callbacks=[Late()], engine="vectorized")


class Domain:
    """What the data set of a client sets, and the step reads."""

    factor = 1.0


DOMAIN = Domain()


class Told(Hidden):
    """Tells whose it is whenever a sample is read."""

    def __getitem__(self, index):
        DOMAIN.factor = len(self)
        return super().__getitem__(index)


class ToldData(BoringData):
    def client_train_dataset(self, client):
        return Told(super().client_train_dataset(client))


class Domains(Plain):
    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1]) * DOMAIN.factor


def test_a_data_set_may_not_change_what_a_mapped_step_reads(tmp_path):
    assert_equal_trees(run(tmp_path, Domains, ToldData), run(tmp_path, Domains, ToldData, record_steps=False))
    with pytest.raises(ConfigurationError, match=r"code that makes the batches changes what it reads"):
        run(tmp_path, Domains, ToldData, engine="vectorized")


def test_a_child_that_calls_itself_by_a_function_of_its_own_is_refused():
    module = Plain()
    assert isinstance(module.net[0], nn.Linear)
    proof = proof_of(module)
    module.net[0]._call_impl = module.net[0].forward
    assert not proof.holds()
    with pytest.raises(NotRecordableError, match="_call_impl of its own"):
        proof_of(module)
