"""PartitionedDataModule: any ordinary data, unchanged; what cannot be federated is refused by name."""

import numpy as np
import pytest
import torch
from helpers.refusals import refused
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedbc_lightning.data import ArrayDataset, PartitionedDataModule
from fedbc_lightning.partition import IID, Dirichlet, Explicit, PowerLaw


def tensors(size, start=0):
    return TensorDataset(torch.arange(start, start + size).float(), torch.arange(size) % 4)


class Pairs(Dataset):
    """Items only."""

    def __init__(self, size, wrap=int):
        self.size, self.wrap, self.reads = size, wrap, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads += 1
        return torch.tensor(float(index)), self.wrap(index % 4)


class Ordinary(LightningDataModule):
    """As people write them."""

    def __init__(self, train=None, has_test=True, has_val=True, **loader):
        super().__init__()
        self.train, self.has_test, self.has_val = train, has_test, has_val
        self.loader = {"batch_size": 6, "shuffle": True} | loader
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")
        if stage == "fit":
            self.train = tensors(80) if self.train is None else self.train
            self.val = tensors(12, 1000)
        if stage == "test":
            self.held_out = tensors(20, 2000)

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self):
        self.calls.append("train_dataloader")
        return DataLoader(self.train, **self.loader)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=5) if self.has_val else []

    def test_dataloader(self):
        return DataLoader(self.held_out, batch_size=7) if self.has_test else None


def ready(*args, **kwargs):
    data = PartitionedDataModule(*args, **kwargs)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    return data


def targets_of(data, client):
    return {int(target) for _, targets in data.client_train_dataloader(client) for target in targets}


def test_shared_test_data():
    ordinary = Ordinary(drop_last=True)
    data = ready(ordinary, PowerLaw(4, 1, 1.0))
    data.teardown("fit")
    assert ordinary.calls == ["prepare_data", "setup fit", "train_dataloader", "setup test", "teardown fit"]
    assert (data.num_clients, data.batch_size, data.eval_batch_size, data.drop_last) == (4, 6, 7, True)
    assert data.num_samples("train").tolist() == [20] * 4
    assert data.num_samples("test").tolist() == [0] * 4
    assert data.client_test_dataset(0) is None
    assert data.client_eval_dataloader(0) is None
    assert [len(targets_of(data, client)) for client in range(4)] == [1] * 4
    assert isinstance(data.client_dataset(0, "train"), ArrayDataset)
    pooled = torch.cat([inputs for inputs, _ in data.pooled_dataloader("test")])
    assert pooled.tolist() == list(range(2000, 2020))
    assert len(data.pooled_dataloader("test")) == len(data.test_dataloader()) == 3
    assert len(data.pooled_dataset("val")) == 12
    assert data.label_histogram().sum() == 80


def test_shared_falls_back_to_validation_data_and_to_none():
    data = ready(Ordinary(has_test=False), IID(4))
    assert len(data.pooled_dataset("test")) == 12
    assert data.eval_batch_size == 5
    data = ready(Ordinary(has_test=False, has_val=False), IID(4))
    assert data.pooled_dataset("test") is None
    assert data.test_dataloader() == []


def test_val_fraction_goes_before_the_wrapped_validation_data():
    data = ready(Ordinary(), IID(4), val_fraction=0.25)
    assert 3 <= data.num_samples("val").min() <= data.num_samples("val").max() <= 7
    assert set(torch.cat([x for x, _ in data.pooled_dataloader("val")]).tolist()) <= set(range(80))


def test_split_and_pool():
    data = ready(Ordinary(), IID(4), test="split")
    assert data.num_samples("train").tolist() == [16] * 4
    assert data.num_samples("test").tolist() == [4] * 4
    data = ready(Ordinary(), IID(4), test="split", pool=True)
    assert (data.num_samples("train") + data.num_samples("test")).tolist() == [25] * 4
    assert isinstance(data.source, ArrayDataset)
    values = torch.cat([x for split in ("train", "test") for x, _ in data.pooled_dataloader(split)])
    assert sorted(values.tolist()) == [*range(80), *range(2000, 2020)]
    with refused(r"data\.pool: Ordinary has no test_dataloader"):
        ready(Ordinary(has_test=False), IID(4), test="split", pool=True)


def test_a_dataset_is_split_inside_its_clients():
    pairs = Pairs(40)
    data = ready(pairs, PowerLaw(4, 1, 1.0), batch_size=3, collate_fn=lambda items: [i for i, _ in items])
    assert pairs.reads == 40  # one pass for the labels, whatever setup is called for
    assert data.batch_size == 3
    assert data.num_samples("test").tolist() == [2] * 4
    assert len(next(iter(data.client_train_dataloader(0)))) == 3
    assert ready(Pairs(40, lambda label: label + 0.5), IID(4)).label_histogram() is None


@pytest.mark.parametrize("wrap", [int, torch.tensor, np.int64, lambda label: np.array(label)])
def test_labels_are_read_from_the_items(wrap):
    data = ready(Pairs(40, wrap), Dirichlet(3, 1.0, 2))
    assert data.labels.tolist() == [i % 4 for i in range(40)]


def test_labels_come_from_attributes_or_arguments():
    pairs = Pairs(40)
    pairs.targets = [i % 2 for i in range(40)]
    joined = ConcatDataset([Subset(pairs, range(10)), tensors(8)])
    data = ready(joined, PowerLaw(2, 1, 1.0))
    assert data.labels.tolist() == [i % 2 for i in range(10)] + [i % 4 for i in range(8)]
    data = ready(pairs, PowerLaw(2, 1, 1.0), labels=[i // 20 for i in range(40)])
    assert sorted(data.label_histogram().tolist()) == [[0, 20], [20, 0]]
    with refused(r"data\.labels: give one integer for each of the 40 samples"):
        ready(pairs, PowerLaw(2, 1, 1.0), labels=[1, 2])


@pytest.mark.parametrize(
    "dataset", [Pairs(8, lambda label: label or 0.5), Pairs(8, lambda label: torch.zeros(2)), tensors(8).tensors[:1]]
)
def test_data_without_labels_cannot_be_split_by_class(dataset):
    dataset = TensorDataset(*dataset) if isinstance(dataset, tuple) else dataset
    with refused(r"PowerLaw needs the class, an integer .data\.labels. of each sample"):
        ready(dataset, PowerLaw(2, 1, 1.0))
    assert ready(dataset, IID(2)).labels is None


def test_tests_are_drawn_by_class_whichever_partitioner_dealt(tmp_path):
    """So that a saved partition gives the same test samples again."""
    data = ready(Pairs(200), Dirichlet(4, 0.5))
    for part, test in zip(data.parts, data.splits["test"], strict=True):
        expected = [round(0.2 * count) for count in np.bincount(part % 4, minlength=4)]
        assert np.bincount(test % 4, minlength=4).tolist() == expected
    data.parts.save(tmp_path / "p.npz", num_samples=200)
    again = ready(Pairs(200), Explicit(tmp_path / "p.npz"))
    assert again.partition_hash() == data.partition_hash()
    unlabelled = Pairs(200, lambda label: label + 0.5)
    assert ready(unlabelled, IID(4)).labels is None
    assert unlabelled.reads == 1  # its first sample tells


@pytest.mark.parametrize("clients", [["a", None, "b", "a"], [1.0, float("nan"), 2.0, 2.0], ["a", 1, "b", 2.5]])
def test_samples_without_a_client_are_refused(clients):
    with refused(r"data\.clients: (sample 1 has no client|found numbers and strings)"):
        ready(tensors(4), clients=np.array(clients, dtype=object))


def test_reading_labels_leaves_the_random_generators():
    class Noisy(Pairs):
        def __getitem__(self, index):
            torch.rand(1)
            np.random.random()
            return super().__getitem__(index)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    ready(Noisy(8), PowerLaw(2, 1, 1.0))
    assert torch.equal(before, torch.get_rng_state())


class SplitBySampler(Ordinary):
    """One data set behind all loaders, and samplers that choose its parts."""

    def part(self, indices):
        return DataLoader(tensors(80), batch_size=6, sampler=SubsetRandomSampler(indices))

    def train_dataloader(self):
        return self.part(range(20, 80))

    def test_dataloader(self):
        return self.part([3, 1])


def test_a_sampler_of_a_subset_chooses_the_samples():
    data = ready(SplitBySampler(), IID(3))
    assert data.shuffle
    assert data.num_samples("train").tolist() == [20, 20, 20]
    found = torch.cat([data.client_dataset(client, "train").batch(torch.arange(20))[0] for client in range(3)])
    assert sorted(found.tolist()) == list(range(20, 80))
    assert [float(inputs) for inputs, _ in data.pooled_dataset("test")] == [3.0, 1.0]


def test_transfer_hooks_are_kept():
    class Doubling(Ordinary):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [2 * batch[0], batch[1]]

    data = ready(Doubling(), IID(2))
    assert data.on_after_batch_transfer([1, 0], 0) == [2, 0]
    assert type(data).on_before_batch_transfer is LightningDataModule.on_before_batch_transfer
    assert "on_before_batch_transfer" not in vars(data)
    assert data.client_train_dataloader(0, device=torch.device("meta")).device is None
    plain = ready(Ordinary(), IID(2))
    assert plain.client_train_dataloader(0, device=torch.device("meta")).device == torch.device("meta")


def test_collate_fn_and_workers_are_the_loaders_own():
    def collate(samples):
        return torch.stack([inputs for inputs, _ in samples])

    data = ready(Ordinary(collate_fn=collate, num_workers=1, worker_init_fn=print), IID(2))
    assert data.loader_options["collate_fn"] is collate
    assert data.loader_options["num_workers"] == 1
    assert data.loader_options["worker_init_fn"] is print
    data.loader_options["num_workers"] = 0
    for name in ("worker_init_fn", "prefetch_factor", "multiprocessing_context"):
        data.loader_options.pop(name)
    assert next(iter(data.client_train_dataloader(0))).shape == (6,)
    assert len(next(iter(data.pooled_dataloader("test")))) == 2


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


class OwnLoader(DataLoader):
    def __iter__(self):
        return super().__iter__()


SIXTEEN = tensors(16)
REFUSED = [
    (lambda: DataLoader(Stream()), "returns a DataLoader with Stream"),
    (lambda: [DataLoader(SIXTEEN), DataLoader(SIXTEEN)], "returns a list"),
    (lambda: CombinedLoader([DataLoader(SIXTEEN)]), "CombinedLoader"),
    (lambda: DataLoader(SIXTEEN, batch_size=None), "SequentialSampler, NoneType"),
    (lambda: OwnLoader(SIXTEEN), "OwnLoader"),
    (lambda: DataLoader(SIXTEEN, sampler=WeightedRandomSampler([1.0] * 16, 16)), "WeightedRandomSampler"),
    (lambda: DataLoader(SIXTEEN, sampler=RandomSampler(SIXTEEN, replacement=True)), "RandomSampler"),
    (lambda: DataLoader(SIXTEEN, sampler=RandomSampler(SIXTEEN, num_samples=4)), "RandomSampler, BatchSampler"),
    (lambda: DataLoader(SIXTEEN, batch_sampler=type("Buckets", (BatchSampler,), {})(range(16), 4, False)), "Buckets"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_loaders_that_cannot_be_federated(make, words):
    ordinary = Ordinary()
    ordinary.train_dataloader = make
    with refused(words) as error:
        ready(ordinary, IID(2))
    assert "Ordinary.train_dataloader" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((SIXTEEN, IID(2), "shared"), "'shared'"),
        ((SIXTEEN, IID(2), "half"), "'half'"),
        ((SIXTEEN, IID(2), "split", True), "pool"),
        ((Ordinary(), IID(2), "shared", True), "pool"),
        ((Ordinary(), IID(2), "shared", False, 2), r"data\.num_workers: it is taken from the train_dataloader of Ord"),
    ],
)
def test_impossible_arguments(arguments, words):
    names = ("data", "partitioner", "test", "pool", "num_workers")
    with refused(words):
        PartitionedDataModule(**dict(zip(names, arguments, strict=False)))


def test_a_partitioner_that_loses_samples_is_caught():
    class Losing(IID):
        def __call__(self, labels, seed):
            return super().__call__(labels[1:], seed)

    data = PartitionedDataModule(SIXTEEN, Losing(2))
    with refused("Losing: 1 of 16 samples are not given exactly once"):
        data.setup()
    with pytest.raises(RuntimeError, match="setup"):
        _ = data.source


def test_without_shuffling_samples_come_in_the_order_of_the_data():
    """As under Lightning, in every epoch and round, of each client and of all together."""
    data = PartitionedDataModule(Ordinary(shuffle=False), Dirichlet(3, 1.0), seed=0)
    data.prepare_data()
    data.setup()
    for client in (-1, 0, 1, 2):
        loader = data.client_train_dataloader(client, 2, seed=0)
        loader.set_epoch(1)
        seen = torch.cat([inputs for inputs, _ in loader])
        assert torch.equal(seen, seen.sort().values)
        assert len(seen) == (80 if client < 0 else len(data.splits["train"][client]))
