"""A mistake in a step, a hook or a data set says at which client, round and batch it came up, in every engine."""

import gc
import re
from pathlib import Path

import pytest
import torch
from helpers.boring import BoringData, BoringModel, Hidden, Linear, make_trainer
from helpers.marks import each_engine
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedbc_lightning import SitesDataModule
from fedbc_lightning.algorithms import FedAvg, PerFedAvg
from fedbc_lightning.core.errors import ConfigurationError, notes_of

HERE = Path(__file__).name


class Own(Linear):
    """Raises in the second round, in the third batch of client 1."""

    def training_step(self, batch, batch_idx):
        if self.trainer.current_round == 2 and self.trainer.current_client == 1 and batch_idx == 2:
            raise KeyError("boom")
        return super().training_step(batch, batch_idx)


class OwnHook(Own):
    def training_step(self, batch, batch_idx):
        return BoringModel.training_step(self, batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        Own.training_step(self, batch, batch_idx)


def fails(self, *args):
    raise KeyError("boom")


def stepping(change):
    """A module whose training_step returns a function of the module, the batch and the usual loss."""

    class Changed(Linear):
        def training_step(self, batch, batch_idx):
            return change(self, batch, super().training_step(batch, batch_idx))

    return Changed


@each_engine
def test_a_client_with_a_name_is_called_by_it(tmp_path, engine):
    sites = SitesDataModule({"Bern": TensorDataset(torch.randn(20, 10), torch.arange(20) % 3)}, test_fraction=0.2)
    trainer = make_trainer(tmp_path, clients_per_round=1, engine=engine)
    with pytest.raises(KeyError) as caught:
        trainer.fit(type("Failing", (Linear,), {"training_step": fails})(), sites, FedAvg())
    assert "client 0 ('Bern'), round 1" in str(notes_of(caught.value))


class Broken(torch.utils.data.Dataset):
    """Cannot read its last sample."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        if index == len(self) - 1:
            raise OSError("no picture")
        return self.dataset[index]


def broken_batches(samples):
    raise OSError("no batch")


class OtherData(BoringData):
    """The data of the boring model, changed by a function of inputs and targets."""

    def __init__(self, change, **kwargs):
        super().__init__(**kwargs)
        self.change = change

    def client_train_dataset(self, client):
        dataset = super().client_train_dataset(client)
        return self.change(*dataset.tensors)


def fit(tmp_path, module, data=None, algorithm=None, **options):
    options = {"max_rounds": 2, "local_epochs": 1, "clients_per_round": 2, **options}
    trainer = make_trainer(tmp_path, **options)
    trainer.fit(module, data or BoringData(), algorithm or FedAvg())


@pytest.mark.parametrize("algorithm", [FedAvg, lambda: PerFedAvg(inner_lr=0.01)], ids=["optimizer", "solver"])
@pytest.mark.parametrize("module", [Own, OwnHook], ids=lambda module: module.__name__)
def test_an_exception_in_a_step_or_hook_says_where(tmp_path, module, algorithm):
    with pytest.raises(KeyError, match="boom") as caught:
        fit(tmp_path, module(), algorithm=algorithm(), clients_per_round=6)
    assert notes_of(caught.value) == ["client 1, round 2, batch 2: (8, 10) float32, (8,) int64 from 0 to 2"]


@pytest.mark.parametrize(
    ("method", "options", "note"),
    [
        ("on_train_epoch_end", {}, r"client \d, round 1"),
        ("test_step", {}, "data of all clients, test, batch 0: .*"),
        ("training_step", {"engine": "vectorized"}, r"client \d, round 1, batch 0: .*"),
    ],
)
def test_an_exception_elsewhere_says_where(tmp_path, method, options, note):
    with pytest.raises(KeyError, match="boom") as caught:
        fit(tmp_path, type("Failing", (Linear,), {method: fails})(), **options)
    assert re.fullmatch(note, notes_of(caught.value)[0])


def test_both_engines_name_the_same_batch(tmp_path):
    def change(inputs, targets):
        targets = targets.clone()
        targets[-1] = 7
        return TensorDataset(inputs, targets)

    notes = []
    for engine in ("sequential", "vectorized"):
        with pytest.raises(IndexError, match="Target 7 is out of bounds") as caught:
            fit(tmp_path / engine, Linear(), OtherData(change, batch_size=4), engine=engine, clients_per_round=1)
        notes += notes_of(caught.value)
    assert len(notes) == 2
    assert len(set(notes)) == 1
    assert re.fullmatch(r"client \d, round 1, batch [1-9]: .* to 7", notes[0])


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"collate_fn": broken_batches}], ids=["item", "worker", "collate"]
)
def test_an_exception_in_a_data_set_or_collate_says_where(tmp_path, monkeypatch, options):
    # The loader's end joins its worker for so long: here at the garbage collection, as the exception holds the loader.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    data = OtherData(lambda *tensors: Broken(TensorDataset(*tensors)), **options)
    with pytest.raises(OSError, match="no ") as caught:
        fit(tmp_path, Linear(), data, eval_every_n_rounds=0)
    assert re.fullmatch(r"client \d, round 1, batch \d", notes_of(caught.value)[0])
    if "num_workers" in options:
        del caught
        gc.collect()


WRONG = {
    "vector": (
        stepping(lambda self, batch, loss: functional.cross_entropy(self(batch[0]), batch[1], reduction="none")),
        rf"model: Changed.training_step \({HERE}, line \d+\) returned a loss of shape \(16,\); return one number",
    ),
    "detached": (stepping(lambda self, batch, loss: loss.detach()), "returned a loss without a gradient; compute it"),
    "text": (stepping(lambda self, batch, loss: "low"), "training_step returned str; return the loss as a tensor"),
    "logged vector": (
        stepping(lambda self, batch, loss: self.log("scores", self(batch[0])[:, 0]) or loss),
        r"self.log\('scores'\): a tensor of shape \(16,\); log one number.",
    ),
    "logged text": (
        stepping(lambda self, batch, loss: self.log("kind", "linear") or loss),
        r"self.log\('kind'\): got 'linear', a str; log a number, a tensor or a Metric.",
    ),
}


@each_engine
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_loss_or_logged_value_is_one_line(tmp_path, kind, engine):
    module, says = WRONG[kind]
    with pytest.raises(ConfigurationError, match=says) as caught:
        fit(tmp_path, module(), engine=engine, eval_every_n_rounds=0)
    assert notes_of(caught.value)[0].startswith("client ")


def test_lbfgs_gets_the_loss_of_every_batch(tmp_path):
    module = stepping(lambda self, batch, loss: None)()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    with pytest.raises(ConfigurationError, match="training_step returned None, but LBFGS needs a loss; return one"):
        fit(tmp_path, module)


def test_a_wrong_loss_of_a_solvers_step_is_one_line(tmp_path):
    module, says = WRONG["vector"]
    with pytest.raises(ConfigurationError, match=says):
        fit(tmp_path, module(), algorithm=PerFedAvg(inner_lr=0.01), eval_every_n_rounds=0)


@pytest.mark.parametrize(
    ("change", "says", "batch"),
    [
        (lambda x, y: TensorDataset(x, y + 2), r"Target \d is out of bounds", "(16,) int64 from 2 to 4"),
        (lambda x, y: TensorDataset(x[:, :7], y), "shapes cannot be multiplied", "(16, 7) float32"),
        (lambda x, y: TensorDataset(x.double(), y), "must have the same dtype", "(16, 10) float64"),
    ],
    ids=["labels", "shapes", "kinds"],
)
def test_data_that_do_not_fit_the_model_are_shown_in_a_note(tmp_path, change, says, batch):
    with pytest.raises((RuntimeError, IndexError), match=says) as caught:
        fit(tmp_path, Linear(), OtherData(change))
    assert notes_of(caught.value)[0].startswith("client ")
    assert batch in notes_of(caught.value)[0]


def test_test_data_that_do_not_fit_are_found_before_training(tmp_path):
    class Data(BoringData):
        def client_test_dataset(self, client):
            inputs, targets = super().client_test_dataset(client)[:]
            return TensorDataset(inputs, targets + 3)

    with pytest.raises(IndexError, match="out of bounds") as caught:
        fit(tmp_path, Linear(), Data())
    assert notes_of(caught.value)[0].startswith("data of all clients, test, batch 0: ")


class NoMethods(BoringData.__base__):
    num_clients = 2


class NoTest(NoMethods):
    def client_train_dataset(self, client):
        return TensorDataset(torch.zeros(4, 10))


class NoNumber(NoTest):
    num_clients = 0

    def client_test_dataset(self, client):
        return None


class NoBase(BoringData):
    def __init__(self):
        self.path = "here"


def raises(*tensors):
    raise OSError("no file")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (NoMethods, "data: NoMethods has no client_train_dataset; define"),
        (NoTest, r"data: NoTest has no client_test_dataset; define client_test_dataset\(self, client\)"),
        (NoNumber, "data: num_clients=0; give the number"),
        (NoBase, r"data: NoBase.__init__ does not call super\(\).__init__\(\)"),
        (lambda: BoringData, "data: got the class BoringData, not an object"),
        (FedAvg, r"data: got an object of FedAvg; give a .*The order is \(model, datamodule, algorithm\)"),
        (lambda: OtherData(lambda *tensors: tensors), r"client_train_dataset\(0\) returned a tuple; give a map"),
    ],
    ids=["methods", "test", "number", "base", "class", "order", "tuple"],
)
def test_a_wrong_data_module_is_one_line(tmp_path, data, says):
    with pytest.raises(ConfigurationError, match=says):
        fit(tmp_path, Linear(), data())


def test_an_exception_in_a_method_for_data_says_which_client(tmp_path):
    with pytest.raises(OSError, match="no file") as caught:
        fit(tmp_path, Linear(), OtherData(raises))
    assert notes_of(caught.value) == ["client 0, its training data"]


def test_a_list_of_samples_is_still_a_data_set(tmp_path):
    fit(tmp_path, Linear(), OtherData(lambda *tensors: list(Hidden(TensorDataset(*tensors)))), max_rounds=1)
