"""Digits, and what all ready data do alike: they load once, split as asked, and follow the seed."""

import torch
from fedbc_lightning.datamodules import DigitsDataModule
from helpers.data_formats import ready

from fedbc_lightning.core import seeding
from fedbc_lightning.partition import PowerLaw


def test_digits():
    data = ready(DigitsDataModule(seed=0))
    assert (data.num_clients, data.parts.sizes.sum()) == (10, 1797)
    inputs, targets = next(iter(data.client_train_dataloader(3)))
    assert inputs.shape == (32, 1, 8, 8)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert data.source.pool.tensors[0].dtype == torch.uint8


def test_setup_loads_once():
    data = ready(DigitsDataModule())
    source = data.source
    data.setup("validate")
    assert data.source is source


def test_ordered_split_is_that_of_the_public_code():
    data = ready(DigitsDataModule(PowerLaw(5, 2, 1.1), split_order="ordered"))
    for client in range(3):
        train, test = data.client_dataset(client, "train"), data.client_dataset(client, "test")
        assert len({int(digit) for _, digit in test}) == 1
        assert len(train) == int(0.8 * (len(train) + len(test)) + 1e-9)


def test_the_partition_follows_seed_everything(monkeypatch):
    hashes = []
    for seed in ("1", "1", "2"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        hashes.append(ready(DigitsDataModule()).partition_hash())
    assert hashes[0] == hashes[1] != hashes[2]
    assert seeding.global_seed() == 2
