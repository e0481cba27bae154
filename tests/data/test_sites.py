"""SitesDataModule: one data set per client, as a list; the same numbers as the same data with a natural client each."""

import numpy as np
import pytest
import torch
from helpers.boring import BoringModel, make_model, make_trainer
from lightning.pytorch import LightningDataModule
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from fedbc_lightning import ConfigurationError, FedAvg, PartitionedDataModule, SitesDataModule
from fedbc_lightning.data import LoadedData
from fedbc_lightning.data.indexed import IndexedDataModule
from fedbc_lightning.trainer.arguments import as_datamodule

SIZES = {"Bern": 20, "Oslo": 12, "Rome": 7}


def tensors(size, seed=0):
    inputs = torch.randn(size, 10, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, torch.arange(size) % 3)


TRAIN = [tensors(n, k) for k, n in enumerate(SIZES.values())]
NAMED = dict(zip(SIZES, TRAIN, strict=True))
TEST = [tensors(n // 2, 9 + k) for k, n in enumerate(SIZES.values())]
NAMED_TEST = dict(zip(reversed(SIZES), reversed(TEST), strict=True))


class Hospital(LightningDataModule):
    """A site's own data module."""

    def __init__(self, number, batch_size=4):
        super().__init__()
        self.number, self.batch_size, self.calls = number, batch_size, []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")
        if stage == "test":
            self.test = TEST[self.number]

    def train_dataloader(self):
        return DataLoader(TRAIN[self.number], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return [DataLoader(TEST[self.number], batch_size=5)]

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=5)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state_dict):
        self.calls.append(state_dict)


class Dealt(IndexedDataModule):
    """The same samples as one data set, with a client for each."""

    def load(self):
        sizes = [*map(len, TRAIN), *map(len, TEST)]
        clients = np.repeat([0, 1, 2, 0, 1, 2], sizes)
        labels = np.concatenate([each.tensors[1].numpy() for each in (*TRAIN, *TEST)])
        is_test = np.repeat([False] * 3 + [True] * 3, sizes)
        return LoadedData(ConcatDataset([*TRAIN, *TEST]), labels, clients, list(SIZES), is_test)


def run(tmp_path, data, **options):
    trainer = make_trainer(tmp_path, max_rounds=2, clients_per_round=1.0, local_epochs=2, **options)
    model = make_model(BoringModel)
    trainer.fit(model, data, FedAvg())
    return model.state_dict(), {
        name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("time/")
    }


SITES = {
    "lists": lambda: SitesDataModule(TRAIN, TEST, names=list(SIZES), batch_size=4, eval_batch_size=5),
    "mappings": lambda: SitesDataModule(NAMED, NAMED_TEST, batch_size=4, eval_batch_size=5),
    "modules": lambda: SitesDataModule([Hospital(k) for k in range(3)], names=list(SIZES)),
}


@pytest.mark.parametrize("kind", SITES)
def test_sites_equal_the_same_data_with_natural_clients(tmp_path, kind):
    expected = Dealt(None, test_fraction=None, batch_size=4, eval_batch_size=5)
    weights, metrics = run(tmp_path / "dealt", expected)
    data = SITES[kind]()
    found, found_metrics = run(tmp_path / "sites", data)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    if kind == "modules":  # their validation data are measured, too
        found_metrics = {name: value for name, value in found_metrics.items() if name in metrics}
    assert found_metrics == metrics
    assert data.client_names == expected.client_names == list(SIZES)
    for split in ("train", "test"):
        assert data.num_samples(split).tolist() == expected.num_samples(split).tolist()
    if kind != "modules":
        assert (data.label_histogram() == expected.label_histogram()).all()


def test_the_modules_of_sites_are_called_as_under_lightning():
    modules = [Hospital(k) for k in range(3)]
    data = SitesDataModule(modules)
    data.prepare_data()
    data.set_up("fit", {"SitesDataModule": data.state_dict()})
    assert modules[1].calls == ["prepare_data", "setup fit", {"number": 1}, "setup test"]
    assert data.batch_size == 4
    assert data.eval_batch_size == 5
    assert data.num_samples("val").tolist() == data.num_samples("test").tolist() == [10, 6, 3]


def test_parts_of_a_site_are_cut_where_it_has_no_data_of_its_own():
    data = SitesDataModule(TRAIN, test_fraction=0.25, val_fraction=0.2, heldout_clients=["Oslo"], names=list(SIZES))
    data.setup()
    sizes = [data.num_samples(split).tolist() for split in ("train", "val", "test")]
    assert sizes == [[11, 6, 3], [3, 3, 1], [6, 3, 3]]
    assert data.heldout.tolist() == [1]
    assert len(data.pooled_dataset("train")) == 14
    data = SitesDataModule(TRAIN, [None, *TEST[1:]])
    data.setup()
    assert data.num_samples("test").tolist() == [0, 6, 3]


class Pictures:
    """A data set of another library than torch, with names of its classes."""

    def __init__(self, classes="xyz", data=TRAIN[0]):
        self.classes, self.data = list(classes), data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def test_a_dict_of_data_is_fitted(tmp_path, caplog):
    sites = {
        "Bern": Pictures(),
        "Oslo": DataLoader(TRAIN[1], batch_size=10, shuffle=True),
        "Rome": Pictures("abcdefg", TRAIN[2]),
    }  # a text per sample
    trainer = make_trainer(tmp_path, max_rounds=2, clients_per_round=1.0)
    result = trainer.fit(make_model(BoringModel), sites, FedAvg())
    assert result.partition["sizes"]["test"] == [4, 3, 1]
    assert (result.partition["client_names"], result.partition["class_names"]) == (list(SIZES), ["x", "y", "z"])
    modules = {name: Hospital(k) for k, name in enumerate(SIZES)}
    result = make_trainer(tmp_path, max_rounds=1).fit(make_model(BoringModel), modules, FedAvg())
    assert result.partition["sizes"]["test"] == [10, 6, 3]
    with caplog.at_level("INFO"):
        assert as_datamodule(modules | {"Bern": TRAIN[0]}).test_fraction == 0
    assert "data: test data are cut from no client, because 'Oslo' is no Dataset; give SitesDataModule" in caplog.text


class Moving(Hospital):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SitesDataModule(TRAIN, TEST[:2]), r"data\.test: 2 entries for 3 sites"),
        (lambda: SitesDataModule({1: TRAIN[0], "1": TRAIN[1]}), r"data\.names: a name is given twice"),
        (lambda: SitesDataModule({"train": TRAIN[0], "Test": TRAIN[1]}), "'train' is a split, .*PartitionedDataM"),
        (lambda: SitesDataModule({"a": TRAIN[0].tensors}).setup(), r"Tensor is no loader.*; give .*TensorDataset"),
        (lambda: SitesDataModule(TRAIN, TEST, test_fraction=0.2), r"data\.test_fraction: the sites have data\.test"),
        (lambda: SitesDataModule({}), r"data\.train: no site; give one or more"),
        (lambda: SitesDataModule(NAMED, {"Olso": TEST[0]}), r"data\.test: no site 'Olso'; did you mean 'Oslo'\?"),
        (lambda: SitesDataModule(TRAIN, {"Oslo": TEST[0]}), r"no site 'Oslo'; data.train has \[\], a mapping"),
        (lambda: SitesDataModule({"a": "b.csv"}).setup(), r"train\['a'\]: str is no loader .*; give a Dataset"),
        (lambda: SitesDataModule({"a": Pictures("xy"), "b": Pictures("yx")}).setup(),
         r"train\['b'\]: its classes are y, x, another site's x, y; give"),
        (lambda: SitesDataModule(TRAIN, TEST[0]), r"data\.test: got .*TensorDataset; give a list"),
        (lambda: SitesDataModule([Moving(0)]), "Moving has on_after_batch_transfer, .* define it in the LightningMod"),
        (lambda: SitesDataModule([Hospital(0), Hospital(1, 8)]).setup(), r"train\[1\]: .* its loader has batch_size=8"),
        (lambda: PartitionedDataModule(TRAIN, clients=[0]), "list of data sets; .* fedbc_lightning.SitesDataModule"),
        (lambda: SitesDataModule(TRAIN).num_samples("val"), "call prepare_data"),
    ],
)  # fmt: skip
def test_what_sites_cannot_be_is_refused_by_name(make, words):
    with pytest.raises((ConfigurationError, RuntimeError), match=words):
        make()
