"""Code between the steps of a client: where it is not known, and after steps as written, proofs are looked at again."""

import types

import pytest
import torch
from helpers.boring import BoringData, assert_equal_trees
from helpers.stateful_steps import Plain
from lightning.pytorch import Callback, LightningModule
from test_proof import proof_of
from test_proof_reach import Moving, run
from torch.nn import functional

from fedbc_lightning import ConfigurationError, recordable
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.data.datasets import ArrayDataset
from fedbc_lightning.data.loading import ClientLoader
from fedbc_lightning.engines.recorded import step_recorder
from fedbc_lightning.module.foreign_step_code import is_known_scheduler


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(step_recorder, "RECORD_AFTER", {"single": 3, "mapped": 2})


class OddData(BoringData):
    """The last batch of each client has four samples, all others twelve."""

    def __init__(self, batch_size):
        super().__init__(batch_size=12)


class Scheduled(Moving):
    """The module's own way of moving a scheduler changes what the step reads."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        self.move()


class Wrapped(Moving):
    """A function around the optimizer's step does."""

    calls = 0

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        step = optimizer.step

        def moving(optimizer, closure=None):
            type(self).calls += 1
            self.move()
            return step(closure)

        optimizer.step = types.MethodType(moving, optimizer)
        return optimizer


class Tail(Moving):
    """A step on another form of a batch does, which is not recorded, and so not proven."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) < 12:
            self.factor *= 0.5
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("model", [Scheduled, Wrapped, Tail])
def test_what_changes_between_steps_is_seen(tmp_path, model):
    written = run(tmp_path / "written", model, OddData, record_steps=False)
    assert_equal_trees(run(tmp_path / "recorded", model, OddData), written)


class Linked(Moving):
    """Data find it under :attr:`last` and move it."""

    last = None

    def __init__(self):
        super().__init__()
        Linked.last = self


class OwnBatchSize(BoringData):
    """Reading the size of a batch runs code of the subclass, once for the loader of each client."""

    batch_size = property(lambda data: int(12 * Linked.last.move()), lambda data, value: None)


class OwnDataset(BoringData):
    def client_dataset(self, client, split):
        Linked.last.move()
        return super().client_dataset(client, split)


class MadeAnew(BoringData):
    """The data of a client are made again in every round, because nothing is kept."""

    def client_train_dataset(self, client):
        Linked.last.move()
        return super().client_train_dataset(client)

    def _keep(self, client, made):
        pass


@pytest.mark.parametrize("data", [OwnBatchSize, OwnDataset, MadeAnew])
def test_what_changes_between_clients_is_seen(tmp_path, data):
    options = {"clients_per_round": 6, "max_rounds": 4}
    written = run(tmp_path / "written", Linked, data, record_steps=False, **options)
    assert_equal_trees(run(tmp_path / "recorded", Linked, data, **options), written)


def test_between_clients_of_kept_data_nothing_is_looked_at_again(tmp_path, monkeypatch):
    starts, start = [], step_recorder.StepRecorder.start
    monkeypatch.setattr(
        step_recorder.StepRecorder, "start", lambda *a, **options: starts.append(a) or start(*a, **options)
    )
    run(tmp_path, Moving, clients_per_round=6, local_epochs=1)
    # The first client's first step is compared as written, so the second looks, too; the other four follow replays.
    assert [round for _, round in starts].count(2) == 2


def test_a_function_around_the_optimizers_step_is_called(tmp_path):
    Wrapped.calls = 0
    run(tmp_path, Wrapped)
    assert Wrapped.calls > 0


class Outside:
    """Where a number stands of which the proof hears nothing."""

    factor = 1.0


@recordable
def factor_of(num_samples):
    return Outside.factor if num_samples < 12 else 1.0


class Vouched(Plain):
    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1]) * factor_of(len(batch[0]))


class Change(Callback):
    def on_round_start(self, trainer, pl_module, *args):
        Outside.factor = 0.3 if trainer.current_round == 3 else 1.0


def test_each_form_of_a_batch_is_compared_in_each_round(tmp_path):
    options = {"max_rounds": 4, "callbacks": [Change()]}
    written = run(tmp_path / "written", Vouched, OddData, record_steps=False, **options)
    with pytest.warns(UserWarning, match="something else than when it was recorded"):
        recorded = run(tmp_path / "recorded", Vouched, OddData, **options)
    assert_equal_trees(recorded, written)


class Norms(Callback):
    """Looks at the gradients that a round leaves."""

    def __init__(self):
        self.found = []

    def on_round_end(self, trainer, pl_module, *args):
        self.found.append([float(parameter.grad.norm()) for parameter in pl_module.parameters()])


def test_callbacks_find_the_gradients_of_the_last_step(tmp_path):
    norms = [Norms(), Norms()]
    run(tmp_path / "written", Plain, callbacks=norms[:1], record_steps=False)
    run(tmp_path / "recorded", Plain, callbacks=norms[1:])
    assert norms[0].found == norms[1].found


@pytest.mark.parametrize("name", ["added_later", "CHECKPOINT_HYPER_PARAMS_KEY"])
def test_attributes_of_library_classes_are_read_like_others(monkeypatch, name):
    proof = proof_of(Plain(lambda module: float(len(getattr(module, name, "none")))))
    assert proof.holds()
    monkeypatch.setattr(LightningModule, name, "something", raising=False)
    assert not proof.holds()


def pulled(module, batch, batch_idx):
    """As written where no input is large, which few are."""
    loss = functional.cross_entropy(module(batch[0]), batch[1])
    return loss + 5 * (batch[0].amax() - 2.8).clamp(min=0) * module.net[0].weight.square().sum()


class Replace(Callback):
    def on_round_start(self, trainer, pl_module, *args):
        if trainer.current_round == 2:
            pl_module.training_step = types.MethodType(pulled, pl_module)


def test_a_step_that_is_replaced_on_the_module_is_taken(tmp_path):
    options = {"callbacks": [Replace()], "max_rounds": 3}
    written = run(tmp_path / "written", Unlogged, record_steps=False, **options)[0]
    assert_equal_trees(run(tmp_path / "recorded", Unlogged, **options)[0], written)


class Unlogged(Plain):
    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])


class ByClient(Plain):
    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1]) * (1 + self.trainer.current_client)


def test_a_mapped_step_that_asks_for_its_client_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"reads self\.trainer\.current_client"):
        run(tmp_path, ByClient, engine="vectorized")


class Telling(BoringData):
    """Tells the step whose batches come."""

    factor = 1.0

    def client_train_dataloader(self, client, *args, **options):
        self.factor = 1.0 + client
        return super().client_train_dataloader(client, *args, **options)


class Listening(Plain):
    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1]) * self.trainer.datamodule.factor


def test_making_a_loader_may_not_change_what_a_mapped_step_reads(tmp_path):
    with pytest.raises(ConfigurationError, match="client_train_dataloader changes what it reads"):
        run(tmp_path, Listening, Telling, engine="vectorized")


class Prototypes(Plain):
    """A buffer that does not travel, and that the end of a round writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("prototype", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1]) * (1 + self.prototype)

    def on_round_end(self):
        self.prototype += 1


def test_buffers_that_do_not_travel_are_put_back_in_both_engines(tmp_path, caplog):
    caplog.set_level("INFO", "lightning.pytorch")
    weights = [run(tmp_path / e, Prototypes, engine=e, max_rounds=3)[0] for e in ("sequential", "vectorized")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value)
    assert caplog.text.count("on_round_end wrote into 'prototype', a buffer with persistent=False") == 2


def test_schedulers_and_data_are_known_by_name():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    known = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert is_known_scheduler(known)
    known.get_lr = lambda: [0.1]
    own = type("Own", (torch.optim.lr_scheduler.StepLR,), {})(optimizer, 1)
    for scheduler in (known, own, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)):
        assert not is_known_scheduler(scheduler)
    tensors = (torch.zeros(4, 2), torch.zeros(4))
    own_data = type("OwnData", (ArrayDataset,), {"__module__": __name__})
    for kind, is_known in ((ArrayDataset, True), (own_data, False)):
        assert all(map(is_ours, ClientLoader(kind(tensors), 2).code_between)) == is_known
