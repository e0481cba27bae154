"""Loaders: both paths give the same batches, in the order that the seeds say, and cheaply."""

import numpy as np
import pytest
import torch
from fedbc_lightning.datamodules import ArraysDataModule
from helpers.boring import Hidden
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from fedbc_lightning.core import seeding
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, ClientLoader, EpochSampler
from fedbc_lightning.data.datasets import as_arrays, join, labels_of, take
from fedbc_lightning.partition import IID
from fedbc_lightning.partition.dealing import count_labels

CPU = torch.device("cpu")


def sample_tensors(size=23):
    return torch.arange(size * 4).view(size, 2, 2).to(torch.uint8), torch.arange(size) % 3


def halve(inputs):
    return inputs.float() / 2


def shift(inputs, generator):
    return inputs + torch.randint(0, 5, (len(inputs), 1, 1), generator=generator).to(inputs)


def assert_same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert type(one) is type(other) is list
        for a, b in zip(one, other, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("at_once", [1, 2**20])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("kind", ["tensors", "subset", "arrays", "array rows"])
def test_both_paths_give_the_same_batches(kind, seed, drop_last, at_once, monkeypatch):
    monkeypatch.setattr("fedbc_lightning.data.loading.BYTES_AT_ONCE", at_once)
    tensors, rows = sample_tensors(), torch.tensor([3, 1, 22, 7, 8, 9, 10])
    dataset = {
        "tensors": TensorDataset(*tensors),
        "subset": Subset(Subset(TensorDataset(*tensors), list(range(3, 23))), [5, 0, 1, 19, 2]),
        "arrays": ArrayDataset(tensors, None, halve),
        "array rows": ArrayDataset(tensors, rows, halve),
    }[kind]
    fast = ClientLoader(as_arrays(dataset), 3, EpochSampler(len(dataset), seed, 2, 5), drop_last=drop_last, device=CPU)
    slow = ClientLoader(Hidden(dataset), 3, EpochSampler(len(dataset), seed, 2, 5), drop_last=drop_last)
    collated = ClientLoader(
        as_arrays(dataset), 3, EpochSampler(len(dataset), seed, 2, 5), drop_last=drop_last,
        options={"collate_fn": default_collate},
    )  # fmt: skip
    for epoch in (0, 1):
        for loader in (fast, slow, collated):
            loader.set_epoch(epoch)
        assert_same(fast, slow)
        assert_same(fast, collated)
        assert len(list(fast)) == len(fast) == len(slow)


@pytest.mark.parametrize("augment", [None, shift])
@pytest.mark.parametrize("at_once", [1, 2**20])
def test_batches_of_one_form_come_together(augment, at_once, monkeypatch):
    """Those in memory, as many as are gathered at once; what is augmented comes one by one."""
    monkeypatch.setattr("fedbc_lightning.data.loading.BYTES_AT_ONCE", at_once)
    loader = ClientLoader(ArrayDataset(sample_tensors(), augment=augment), 5, EpochSampler(23, 7), device=CPU)
    stretches = list(loader.stretches())
    assert_same([batch for batches in stretches for batch in batches], loader)
    assert list(map(len, stretches)) == ([4, 1] if augment is None and at_once > 1 else [1] * 5)
    of_users = ClientLoader(as_arrays(TensorDataset(*sample_tensors())), 5, options={"collate_fn": default_collate})
    assert list(map(len, of_users.stretches())) == [1] * 5


def test_augmentation_is_drawn_by_round_client_epoch_and_step():
    tensors = sample_tensors()
    raw = ArrayDataset(tensors, None, halve, shift)
    loader = ClientLoader(raw, 5, EpochSampler(23, seed=3, round=4, client=2))
    loader.set_epoch(1)
    order = torch.randperm(23, generator=seeding.generator(3, "shuffle", 4, 2, 1))
    generators = [seeding.generator(3, "augment", 4, 2, 1, step) for step in range(5)]
    expected = [
        [halve(shift(tensors[0][rows], generator)), tensors[1][rows]]
        for rows, generator in zip(order.split(5), generators, strict=True)
    ]
    assert_same(loader, expected)
    assert_same(loader, expected)


def test_evaluation_augments_nothing():
    tensors = sample_tensors()
    plain = [[halve(tensors[0][rows]), tensors[1][rows]] for rows in torch.arange(23).split(4)]
    assert_same(ClientLoader(ArrayDataset(tensors, None, halve, shift), 4), plain)


def test_workers_give_the_same_batches_and_nothing_is_drawn_from_the_global_generator():
    before = torch.get_rng_state()
    dataset = Hidden(TensorDataset(*sample_tensors()))
    sampler = EpochSampler(23, seed=1, round=1, client=0)
    assert_same(ClientLoader(dataset, 6, sampler), ClientLoader(dataset, 6, sampler, options={"num_workers": 1}))
    list(ClientLoader(ArrayDataset(sample_tensors(), None, halve, shift), 6, sampler))
    assert torch.equal(before, torch.get_rng_state())


def test_items_of_an_array_data_set():
    dataset = ArrayDataset(sample_tensors(), torch.tensor([4, 2]), halve, shift)
    assert dataset[-1][1] == dataset[1][1] == 2
    assert torch.equal(dataset[0][0], halve(sample_tensors()[0][4]))
    assert len(list(dataset)) == 2
    with pytest.raises(IndexError):
        dataset[2]


def test_a_data_set_with_rows_of_its_own_is_read_through_them():
    class Late(ArrayDataset):
        def rows(self, positions):
            return (positions + 4) % len(self.pool)

    batches = ClientLoader(Late((torch.arange(10.0),)), 4)
    assert torch.cat([batch[0] for batch in batches]).tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]


def test_what_cannot_be_gathered_is_refused():
    with pytest.raises(IndexError):  # more samples than there are rows are no short batch
        list(ClientLoader(ArrayDataset((torch.arange(3.0),)), 2, EpochSampler(5)))
    with pytest.raises(ValueError, match=r"lengths \[3, 2\]"):
        ArrayDataset((torch.zeros(3), torch.zeros(2)))


@pytest.mark.parametrize("asked", [None, True, False])
def test_what_is_kept_on_the_device(asked, monkeypatch):
    """By default what fills at most a quarter of its free memory; the meta device stands for one."""
    monkeypatch.setattr("fedbc_lightning.data.datasets._free_bytes", lambda device: 4 * 100 * 8)
    device = torch.device("meta")
    for count in (100, 101):
        data = ArraysDataModule(torch.zeros(count), torch.zeros(count), partitioner=IID(2), keep_on_device=asked)
        data.setup()
        pool = as_arrays(data.client_dataset(0, "train")).pool
        (inputs, _) = pool.on(device)
        assert inputs.device.type == ("meta" if asked or (asked is None and count == 100) else "cpu")
        assert pool.on(device)[0] is inputs


def test_a_subclass_with_its_own_items_is_not_read_in_memory():
    class Own(TensorDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)[0]

    own = Own(*sample_tensors())
    assert as_arrays(own) is None
    assert as_arrays(Subset(own, [1])) is None
    assert isinstance(take(own, np.array([1, 2])), Subset)


def test_join_stays_in_memory_where_it_can():
    tensors = sample_tensors()
    shared = ArrayDataset(tensors, None, halve)
    parts = [shared.subset(np.array([5, 6])), shared.subset(np.array([1]))]
    joined = join(parts)
    assert isinstance(joined, ArrayDataset)
    assert joined.pool is shared.pool
    assert joined.indices.tolist() == [5, 6, 1]
    dataset = TensorDataset(*tensors)
    assert take(dataset, np.array([1])).pool is as_arrays(Subset(dataset, [2, 3])).pool
    others = join([TensorDataset(*tensors), Subset(TensorDataset(*tensors), [0]), TensorDataset(*tensors)])
    assert isinstance(others, ArrayDataset)
    assert len(others) == 47
    assert isinstance(join([shared, TensorDataset(*tensors)]), ConcatDataset)
    with pytest.raises(ConfigurationError, match="augmented in different ways"):
        join([shared, ArrayDataset(tensors, None, halve, shift)], is_training=True)
    assert isinstance(join([TensorDataset(torch.zeros(2, 3)), TensorDataset(torch.zeros(2, 4))]), ConcatDataset)


def test_samples_of_unequal_length_ask_for_a_collate_fn():
    texts = [(torch.zeros(1 + k), k) for k in range(4)]
    with pytest.raises(ConfigurationError, match=r"equal size.*give data\.collate_fn"):
        list(ClientLoader(texts, 2, options={"num_workers": 1}))


def test_labels_are_found_without_reading_samples():
    class Files(Dataset):
        def __init__(self, **names):
            vars(self).update(names)

        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise AssertionError("read")

    assert labels_of(Files(targets=[1, 2, 0, 1])).tolist() == [1, 2, 0, 1]
    assert labels_of(Files(labels=torch.tensor([1, 2, 0, 1]))).tolist() == [1, 2, 0, 1]
    for targets in (["a", "b", "c", "d"], [1, 2], [[1], [2, 3], [4], [5]], None):
        assert labels_of(Files(targets=targets)) is None
    joined = ConcatDataset([Subset(Files(targets=[1, 2, 0, 1]), [3, 1]), TensorDataset(*sample_tensors(3))])
    assert labels_of(joined).tolist() == [1, 2, 0, 1, 2]
    assert labels_of(ConcatDataset([Files(), TensorDataset(*sample_tensors(3))])) is None
    for tensors in ((torch.zeros(3), torch.zeros(3)), (torch.arange(3),)):
        assert labels_of(TensorDataset(*tensors)) is None
    assert labels_of(ArrayDataset(sample_tensors(), torch.tensor([2, 1]))).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("labels", "columns"), [([0, 2], 3), ([0, 19], 20), ([0, 20], 2), ([-1, 1], 2), ([5, 6, 7], 8), ([], 0)]
)
def test_labels_are_counted_by_class_or_by_value(labels, columns):
    """Classes nobody has keep their column, unless the labels are too far apart to be numbers of classes."""
    counts = count_labels(np.array(labels, dtype=np.int64), np.zeros(len(labels), dtype=np.int64), 2)
    assert counts.shape == (2, columns)
    assert counts.sum(axis=1).tolist() == [len(labels), 0]
    quantities = np.arange(200_000)
    assert count_labels(quantities, 0 * quantities, 100_000) is None
