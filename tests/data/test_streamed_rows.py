"""Rows of Parquet shards, streamed by Hugging Face's library: the numbers of rows in memory, in constant memory."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.boring import Plain, make_trainer
from torch.utils.data import DataLoader, TensorDataset

from fedbc_lightning import FedAvg, SitesDataModule

datasets = pytest.importorskip("datasets")


def write_shards(folder, num_rows, num_shards=1):
    """Write shards of row groups, and return their rows in order."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    inputs = random.standard_normal((num_rows, 10)).astype(np.float32)
    targets = inputs[:, :3].argmax(1)
    for k, part in enumerate(np.array_split(np.arange(num_rows), num_shards)):
        frame = pd.DataFrame({"inputs": list(inputs[part]), "target": targets[part]})
        frame.to_parquet(folder / f"{k:02d}.parquet", row_group_size=16)
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))


def streamed(folder, **shuffle):
    shards = sorted(map(str, folder.glob("*.parquet")))
    rows = datasets.load_dataset("parquet", data_files=shards, split="train", streaming=True)
    return rows.shuffle(**shuffle) if shuffle else rows


def loaders(tmp_path, **shuffle):
    made = [streamed(tmp_path / name, **shuffle).with_format("torch") for name in "ab"]
    return [DataLoader(rows, batch_size=16, collate_fn=as_pair) for rows in made]


def as_pair(samples):
    return [torch.stack([row[name] for row in samples]) for name in ("inputs", "target")]


def trained(tmp_path, sites, **options):
    torch.manual_seed(0)
    model = Plain()
    settings = {"max_rounds": 2, "local_epochs": 2, "clients_per_round": 1.0, **options}
    make_trainer(tmp_path, **settings).fit(model, SitesDataModule(sites), FedAvg())
    return list(model.parameters())


def test_streamed_parquet_gives_the_numbers_of_the_rows_in_memory(tmp_path):
    in_memory = [write_shards(tmp_path / name, n) for name, n in (("a", 70), ("b", 45))]
    expected = trained(tmp_path / "1", [DataLoader(rows, batch_size=16) for rows in in_memory])
    found = trained(tmp_path / "2", loaders(tmp_path))
    assert all(map(torch.equal, found, expected))


def test_shuffled_shards_are_read_alike_in_every_run(tmp_path):
    for name, n in (("a", 70), ("b", 45)):
        write_shards(tmp_path / name, n, num_shards=3)
    shuffled = loaders(tmp_path, seed=1, buffer_size=20)
    runs = [trained(tmp_path / str(k), shuffled) for k in range(2)]  # set_epoch is told the same numbers again
    assert all(map(torch.equal, *runs))
    read = []
    for epoch in range(2):
        shuffled[0].dataset.set_epoch(epoch)
        read.append([row["inputs"][0].item() for row in shuffled[0].dataset])
    assert read[0] != read[1]
    assert sorted(read[0]) == sorted(read[1])


def status(name):
    """A line of what the kernel tells about this process's memory, in MiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


def first_numbers(samples):
    inputs = torch.stack([torch.frombuffer(bytearray(row["blob"][:40]), dtype=torch.float32) for row in samples])
    return [inputs, inputs[:, :3].argmax(1)]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_memory_does_not_grow_with_a_stream(tmp_path):
    """20 times the shards, 31 MiB, in a pass that counts them and a round: in memory 5 times the bound."""

    def growth(num_shards, name):
        (tmp_path / name).mkdir()
        random = np.random.default_rng(0)
        for k in range(num_shards):
            blobs = [random.standard_normal(2048).astype(np.float32).tobytes() for _ in range(100)]
            path = tmp_path / name / f"{k}.parquet"
            pd.DataFrame({"blob": blobs}).to_parquet(path, row_group_size=32)
        rows = streamed(tmp_path / name, seed=0, buffer_size=50)
        del blobs
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status("VmRSS")
        trained(
            tmp_path / f"run {name}",
            [DataLoader(rows, batch_size=50, collate_fn=first_numbers)],
            max_rounds=1,
            local_epochs=1,
        )
        return status("VmHWM") - before

    growth(2, "what is loaded once")
    small, large = growth(2, "small"), growth(40, "large")
    assert large - small < 6, (small, large)
