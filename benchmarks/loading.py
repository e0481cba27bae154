"""An epoch of augmented images: our batches from memory against torch's DataLoader, in turn within one run.

    python benchmarks/loading.py --data FOLDER [--clients 1 100] [--batch-size 32] [--repeats 3]

FOLDER holds images as ``<class>/*.jpg`` or ``{train,test}/<class>/*.jpg``, all of one size, e.g. the 60,000 of
CIFAR-10. Each way gives every image once, moved by up to an eighth of its width (RandomCrop) and normalised, as float32
batches on the CPU, over clients of equal size with a loader each; nothing is trained. Decoding is left out: all ways
hold decoded images.

memory       ours: uint8 tensors, batches gathered by index and transformed as a whole
memory + v2  ours, but RandomCrop is torchvision's, called image by image (``EachImage``)
workers 0    as is usual elsewhere: a list of PIL images, torchvision's transforms for each, a DataLoader
workers 2    the same with two processes per DataLoader

Prints seconds per epoch (median, minimum to maximum) and the ratio to the first way of the same turn: machines are
noisy, ratios carry over.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from fedbc_lightning.datamodules import ImageFolderDataModule
from fedbc_lightning.datamodules.transforms import EachImage
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision.transforms import v2

from fedbc_lightning.data import ArrayDataset, ClientLoader, EpochSampler
from fedbc_lightning.partition import IID

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class PerSample(Dataset):
    """Decoded images, transformed one by one.

    Args:
        images: Of PIL.
        targets: Class of each.
        transform: Of each image.
    """

    def __init__(self, images: list[Image.Image], targets: list[int], transform: Callable) -> None:
        self.images, self.targets, self.transform = images, targets, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.targets[index]


def prepare(folder: Path, num_clients: int, batch_size: int) -> dict[str, list[Callable[[int], Iterable]]]:
    """For each way the loaders of all clients, each made from the number of the epoch."""
    data = ImageFolderDataModule(str(folder), IID(num_clients), augment=True, mean=MEAN, std=STD, test_fraction=None)
    data.setup()
    source = data.source
    assert isinstance(source, ArrayDataset)
    images, targets = source.pool.tensors
    size, padding = images.shape[-1], max(images.shape[-1] // 8, 1)
    each_image = EachImage(v2.RandomCrop(size, padding=padding))
    torchvisions = ArrayDataset(source.pool, None, source.transform, each_image)
    usual = v1.Compose([v1.RandomCrop(size, padding=padding), v1.ToTensor(), v1.Normalize(MEAN, STD)])
    pictures = [Image.fromarray(image) for image in images.permute(0, 2, 3, 1).numpy()]

    def from_memory(dataset: ArrayDataset, client: int) -> Callable[[int], Iterable]:
        mine = dataset.subset(data.parts[client])
        return lambda epoch: ClientLoader(mine, batch_size, EpochSampler(len(mine), 0, epoch, client))

    def by_workers(client: int, num_workers: int) -> Callable[[int], Iterable]:
        part = data.parts[client].tolist()
        mine = PerSample([pictures[i] for i in part], targets[part].tolist(), usual)
        return lambda _: DataLoader(mine, batch_size, shuffle=True, num_workers=num_workers)

    clients = range(num_clients)
    return {
        "memory": [from_memory(source, client) for client in clients],
        "memory + v2": [from_memory(torchvisions, client) for client in clients],
        "workers 0": [by_workers(client, 0) for client in clients],
        "workers 2": [by_workers(client, 2) for client in clients],
    }


def measure(loaders: list[Callable[[int], Iterable]], epoch: int) -> tuple[float, int]:
    """Seconds of one epoch over all clients, and the images that came."""
    started, count = time.perf_counter(), 0
    for loader in loaders:
        for inputs, _ in loader(epoch):
            count += len(inputs)
    return time.perf_counter() - started, count


def rows(folder: Path, num_clients: int, batch_size: int, repeats: int) -> Iterator[str]:
    """One line of the table for each way."""
    ways = prepare(folder, num_clients, batch_size)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for epoch in range(1, repeats + 1):
        for name, loaders in ways.items():
            spent, count = measure(loaders, epoch)
            seconds[name].append(spent)
    for name, values in seconds.items():
        ratios = [value / first for value, first in zip(values, seconds["memory"], strict=True)]
        yield (
            f"{num_clients:7} clients  {name:12}{statistics.median(values):8.2f} s ({min(values):.2f} to "
            f"{max(values):.2f}) for {count:,} images   / memory {statistics.median(ratios):.1f} ({min(ratios):.1f} to "
            f"{max(ratios):.1f})"
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of images")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 100], help="numbers of clients")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    print(f"batches of {given.batch_size}, {torch.get_num_threads()} threads, {given.repeats} turns", flush=True)
    for num_clients in given.clients:
        for row in rows(given.data, num_clients, given.batch_size, given.repeats):
            print(row, flush=True)


if __name__ == "__main__":
    main()
