"""FederatedDataModule: what follows from the three things that a subclass gives."""

import lightning
import pytest
import torch
from helpers.boring import Hidden
from lightning.pytorch import LightningModule
from torch.utils.data import Subset, TensorDataset

from fedbc_lightning.core import seeding
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, FederatedDataModule

SIZES = (10, 3, 25)


class Toy(FederatedDataModule):
    """Targets count 0, 1, 2 inside a client; inputs are unique over all clients."""

    calls = 0

    def __init__(self, sizes=SIZES, tests=2, hide=False, **kwargs):
        super().__init__(**kwargs)
        self.sizes, self.tests, self.hide = sizes, tests, hide

    @property
    def num_clients(self):
        return len(self.sizes)

    def client_train_dataset(self, client):
        self.calls += 1
        return self.make(100 * client, self.sizes[client])

    def client_test_dataset(self, client):
        return self.make(100 * client + 50, self.tests) if self.tests and client != 1 else None

    def make(self, start, size):
        inputs = torch.arange(start, start + size, dtype=torch.float32)
        dataset = TensorDataset(inputs, torch.arange(size) % 3)
        return Hidden(dataset) if self.hide else dataset


def inputs_of(loader):
    return torch.cat([inputs for inputs, _ in loader]).tolist()


@pytest.mark.parametrize("hide", [False, True])
def test_sizes_and_loaders(hide):
    data = Toy(hide=hide, batch_size=4, eval_batch_size=7)
    assert data.num_samples("train").tolist() == [10, 3, 25]
    assert data.num_samples("val").tolist() == [0, 0, 0]
    assert data.num_samples("test").tolist() == [2, 0, 2]
    assert data.num_batches().tolist() == [3, 1, 7]
    loader = data.client_train_dataloader(2, round=5, seed=9)
    loader.set_epoch(3)
    order = torch.randperm(25, generator=seeding.generator(9, "shuffle", 5, 2, 3))
    assert inputs_of(loader) == (200.0 + order).tolist()
    assert [len(inputs) for inputs, _ in loader] == [4] * 6 + [1]
    assert (loader.batch_size, loader.num_samples, len(loader)) == (4, 25, 7)
    assert data.client_eval_dataloader(1) is None
    assert data.client_eval_dataloader(0, "val") is None
    assert inputs_of(data.client_eval_dataloader(2)) == [250, 251]
    assert inputs_of(data.pooled_dataloader("test")) == [50, 51, 250, 251]
    assert len(data.pooled_dataloader("train")) == 6
    assert data.calls == 3


def test_validation_is_cut_from_training_and_stratified():
    data = Toy(sizes=(30, 1, 2), val_fraction=0.2)
    assert data.num_samples("train").tolist() == [24, 1, 1]
    assert data.num_samples("val").tolist() == [6, 0, 1]
    assert sorted(
        inputs_of(data.client_eval_dataloader(0, "val")) + inputs_of(data.client_train_dataloader(0))
    ) == list(range(30))
    targets = torch.cat([targets for _, targets in data.client_eval_dataloader(0, "val")])
    assert targets.bincount().tolist() == [2, 2, 2]
    again, other = Toy(sizes=(30, 1, 2), val_fraction=0.2), Toy(sizes=(30, 1, 2), val_fraction=0.2, seed=1)
    assert again.partition_hash() == data.partition_hash() != other.partition_hash()


def test_clients_that_cannot_train_are_named():
    with pytest.raises(ConfigurationError, match="num_clients=0"):
        Toy(sizes=()).validate_clients()
    with pytest.raises(ConfigurationError, match="client 1 has no training samples"):
        Toy(sizes=(4, 0, 3)).validate_clients()
    with pytest.raises(ConfigurationError, match="client 1 and 1 more has no"):
        Toy(sizes=(4, 0, 0)).validate_clients()
    with pytest.raises(ConfigurationError, match=r"drop_last: client 1 has 3 .* at most 3"):
        Toy(drop_last=True, batch_size=4).validate_clients()
    data = Toy(drop_last=True, batch_size=3)
    data.validate_clients()
    assert data.num_batches().tolist() == [3, 1, 8]
    assert [len(data.client_train_dataloader(client)) for client in range(3)] == [3, 1, 8]
    assert [len(inputs) for inputs, _ in data.client_train_dataloader(0)] == [3, 3, 3]


class Doubled(ArrayDataset):
    def __getitem__(self, index):
        return tuple(2 * part for part in super().__getitem__(index))


@pytest.mark.parametrize(("kind", "options"), [(ArrayDataset, {"collate_fn": list}), (Doubled, {})])
def test_augmenting_of_samples_one_by_one_is_refused(kind, options):
    class Augmented(Toy):
        def client_train_dataset(self, client):
            return kind((torch.ones(3, 1), torch.zeros(3)), augment=self.augment)

    Augmented.augment = staticmethod(lambda inputs, generator: inputs)
    with pytest.raises(ConfigurationError, match="augmented in whole batches, but a collate_fn or a data set"):
        Augmented(**options).client_train_dataloader(0)
    Augmented.augment = None
    if kind is Doubled:  # a way of its own to read items is taken in a client's batches, too
        assert next(iter(Augmented().client_train_dataloader(0)))[0].tolist() == [[2.0], [2.0], [2.0]]


class Rows(Toy):
    def client_train_dataset(self, client):
        return Subset(ALL, self.sizes)


ALL = TensorDataset(torch.arange(40.0), torch.arange(40) % 2)


def test_hash_and_histogram():
    assert Rows(sizes=(0, 1), tests=0).partition_hash() != Rows(sizes=(0, 2), tests=0).partition_hash()
    data = Toy()
    assert len(data.partition_hash()) == 64
    assert Toy().partition_hash() == data.partition_hash()
    assert Toy(sizes=(10, 4, 24)).partition_hash() != data.partition_hash()
    assert data.label_histogram().tolist() == [[5, 4, 3], [1, 1, 1], [10, 9, 8]]
    assert Toy(hide=True).label_histogram() is None


class Mean(LightningModule):
    """Notes what it sees."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen, self.validated, self.tested = [], [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].tolist())
        return (self.weight * batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.validated += batch[0].tolist()

    def test_step(self, batch, batch_idx):
        self.tested += batch[0].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_plain_lightning_trainer_takes_it(tmp_path):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_epochs": 2, "accelerator": "cpu", "num_sanity_val_steps": 0, "default_root_dir": tmp_path}
    options |= dict.fromkeys(off, False)
    one = Toy(sizes=(10,), batch_size=4, tests=3, val_fraction=0.2)
    model = Mean()
    trainer = lightning.Trainer(**options)
    trainer.fit(model, datamodule=one)
    expected = []
    for epoch in range(2):
        loader = one.client_train_dataloader(0, round=1)
        loader.set_epoch(epoch)
        expected += [inputs.tolist() for inputs, _ in loader]
    assert model.seen == expected
    assert len(model.validated) == 2 * one.num_samples("val").sum() == 6
    trainer.test(model, datamodule=one, verbose=False)
    assert model.tested == [50, 51, 52]


def test_data_of_few_clients_are_kept(monkeypatch):
    """Those of others are asked for again, whole: a client's validation part never comes without its training part."""
    monkeypatch.setattr("fedbc_lightning.data.datamodule.KEPT_BYTES", 4 * (4096 + 80))  # two parts of two clients
    asked = []

    class Generated(FederatedDataModule):
        num_clients = 5

        def client_train_dataset(self, client):
            asked.append(client)
            return TensorDataset(torch.full((10, 1), float(client)), torch.arange(10) % 2)

        def client_test_dataset(self, client):
            return None

    data = Generated(val_fraction=0.2, seed=0)
    assert data.num_samples("train").tolist() == [8] * 5
    assert data.num_samples("val").tolist() == [2] * 5
    assert asked == [0, 1, 2, 3, 4]
    first = data.client_dataset(0, "train")
    assert data.client_dataset(0, "train") is first
    for client in (1, 2, 0):
        data.client_dataset(client, "train")
    # Labels of data that are made anew, where the ids of objects come back
    assert data.label_histogram().tolist() == [[5, 5]] * 5
    again = [data.client_dataset(0, split) for split in ("train", "val")]
    assert [len(part) for part in again] == [8, 2]
    assert again[0] is not first
    assert torch.equal(again[0].indices, first.indices)


# loaders of many clients

CLIENTS = [2, 0, 1]


class Own(Toy):
    """Gives client 0 larger batches."""

    def client_train_dataloader(self, client, *args, **options):
        loader = super().client_train_dataloader(client, *args, **options)
        loader.batch_size += 2 * (client == 0)
        return loader


def loaders_of(data):
    return data.client_dataloaders(CLIENTS, "train", 5, seed=9)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"hide": True}, {"val_fraction": 0.4}, {"order": True}])
def test_they_are_the_loaders_that_the_data_module_makes_for_each_client(options):
    data = Toy(batch_size=3, **{name: value for name, value in options.items() if name != "order"})
    data.shuffle = "order" not in options
    together = loaders_of(data)
    alone = [data.client_train_dataloader(client, 5, seed=9) for client in CLIENTS]
    assert len(together) == 3
    for one, other in zip(together, alone, strict=True):
        one.set_epoch(1)
        other.set_epoch(1)
        batches = [list(loader) for loader in (one, other)]
        assert all(map(torch.equal, *[[part for batch in of_one for part in batch] for of_one in batches]))
    assert together.num_batches.tolist() == [len(loader) for loader in alone]
    assert together.sizes.tolist() == [loader.num_samples for loader in alone]
    assert together.datasets == [loader.dataset for loader in alone]
    assert together.gathers is not options.get("hide", False)


@pytest.mark.parametrize("on_instance", [False, True])
def test_a_method_of_the_users_own_makes_each_loader(on_instance):
    data = own = Own(batch_size=3)
    if on_instance:
        data = Toy(batch_size=3)
        data.client_train_dataloader = own.client_train_dataloader
    loaders = loaders_of(data)
    assert [loader.batch_size for loader in loaders] == [3, 5, 3]
    assert not loaders.gathers
    assert data.client_dataloaders([2, 1], "test") is None  # client 1 has no test data
