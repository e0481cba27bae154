"""MNIST, CIFAR-10 and CIFAR-100: both sets are pooled and dealt out, as in the FedBC paper, or the test set is kept."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedbc_lightning.core.checks import check_choice
from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import Partitioner, PowerLaw

from .idx import damaged, find_idx, read_labelled_images
from .own_test import OwnTest, keep_own_test
from .transforms import (
    BatchAugmentation,
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    as_augment,
    as_transform,
    check_transforms,
)


class VisionDataModule(IndexedDataModule):
    """A public set of images, held in memory as uint8; a subclass names its files and reads them.

    torchvision is asked only to download. Files are checked in ``prepare_data``, before anything is trained.

    Args:
        root: Folder of the files.
        partitioner: Which client has which images; None: ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Fetch the files if they are missing.
        augment: As of :class:`CIFAR10DataModule`.
        transform: As of :class:`CIFAR10DataModule`.
        test: ``"split"``: the test images are pooled with all others, and ``test_fraction`` of each client's images
            test its models. ``"shared"``: the training images are dealt out, and the test images evaluate the global
            model; clients have none.
        **kwargs: Of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        dataset_name: Of the class in ``torchvision.datasets``.
        layout: The files that are looked for, for the message when they are missing.
        mean: Of each channel, for pixels in [0, 1].
        std: Likewise.
        other_way: What to do where the test images are not to be dealt out, in the line that says what was found.
    """

    dataset_name: ClassVar[str]
    other_way: ClassVar[str] = " (data.test: shared keeps the test images for testing)"
    layout: str
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]

    def __init__(
        self,
        root: str,
        partitioner: Partitioner | None,
        download: bool,
        augment: bool | nn.Module,
        transform: nn.Module | None,
        test: OwnTest = "split",
        **kwargs: Any,
    ) -> None:
        check_choice("data.test", test, ("split", "shared"))
        super().__init__(partitioner or PowerLaw(20, classes_per_client=2, exponent=1.2), **kwargs)
        self.test = test
        if test == "shared":
            self.test_fraction = None
        self.root = Path(root).expanduser()
        self.download = download
        self.augment = as_augment(augment, self.usual_augmentation())
        self.transform = as_transform(transform, Normalize(self.mean, self.std))

    @abstractmethod
    def usual_augmentation(self) -> BatchAugmentation:
        """What ``augment=True`` means."""

    @abstractmethod
    def missing_file(self) -> Path | None:
        """The first file that is not there; None: all are."""

    @abstractmethod
    def read(self) -> tuple[np.ndarray, np.ndarray, int]:
        """All images, training set first, uint8 ``(M, C, H, W)``, their classes, int64 ``(M,)``, and how many train.

        Raises:
            ConfigurationError: A file is damaged.
        """

    @abstractmethod
    def check_files(self) -> None:
        """Look at every file.

        Raises:
            ConfigurationError: One is damaged.
        """

    def fetch(self) -> None:
        """Download by torchvision, which puts the files where they are looked for."""
        from torchvision import datasets  # takes a second to import

        getattr(datasets, self.dataset_name)(self.root, download=True)

    def prepare_data(self) -> None:
        """Download what is missing, and check what is there."""
        missing = self.missing_file()
        if missing is not None and self.download:
            try:
                with _no_empty_folders_left(missing.parent):
                    self.fetch()
            except Exception as error:  # whatever can go wrong on the way
                raise self._not_there(f"could not be downloaded ({first_line(error)})") from error
            missing = self.missing_file()
        if missing is not None:
            why = "is not complete after its download" if self.download else "is not there, and download is false"
            raise self._not_there(f"{why} (no file {missing.name!r})")
        self.check_files()

    def load(self) -> LoadedData:
        """All images, training set first, and their classes; or the training set, with the test set beside it."""
        pixels, labels, num_train = self.read()
        found = f"{self.dataset_name}: {num_train:,} training and {len(labels) - num_train:,} test images"
        rank_zero_info(
            f"{found}; the training images are dealt out to the clients, the test images evaluate the global model."
            if self.test == "shared"
            else f"{found}, pooled and dealt out to the clients{self.other_way}."
        )
        images = torch.from_numpy(pixels)
        check_transforms(images[:2], self.transform, self.augment)
        tensors = (images, torch.from_numpy(labels))
        dataset = ArrayDataset(tensors, transform=self.transform, augment=self.augment)
        if self.test == "shared":
            return keep_own_test(dataset, labels, np.arange(len(labels)) >= num_train)
        return LoadedData(dataset, labels)

    def _not_there(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"data.root={str(self.root)!r}: {self.dataset_name} {reason}; expected {self.layout} in it"
        )


class IdxDataModule(VisionDataModule):
    """Grey images of 28 x 28 pixels in IDX files, plain or as downloaded (``.gz``).

    Attributes:
        num_classes: Labels in the files go from 0 to this, excluded.
        prefixes: What the names of training and test files begin with.
    """

    num_classes: int
    prefixes: tuple[str, str]

    def usual_augmentation(self) -> BatchAugmentation:
        """Images are moved by up to 2 pixels."""
        return RandomCrop(padding=2)

    def missing_file(self) -> Path | None:
        """The first file that is not there; None: all are."""
        return next((path for pair in self._files() for path in pair if find_idx(path) is None), None)

    def check_files(self) -> None:
        """Look at every file; of plain ones, images are not read."""
        self._parts()

    def read(self) -> tuple[np.ndarray, np.ndarray, int]:
        """All images, training set first, uint8 ``(M, 1, 28, 28)``, their classes, ``(M,)``, and how many train."""
        images, labels = zip(*self._parts(), strict=True)
        return np.concatenate(images)[:, None], np.concatenate(labels).astype(np.int64), len(labels[0])

    def _parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Images and labels of the training and of the test set, checked."""
        parts = []
        for names in self._files():
            images, labels = (find_idx(path) or path for path in names)
            pixels, classes = read_labelled_images(images, labels, 28)
            if classes.max(initial=0) >= self.num_classes:
                raise damaged(labels, f"has the label {classes.max()} of {self.num_classes} classes")
            parts.append((pixels, classes))
        return parts

    def _files(self) -> list[tuple[Path, Path]]:
        folder = self.root / self.dataset_name / "raw"
        return [
            (folder / f"{prefix}-images-idx3-ubyte", folder / f"{prefix}-labels-idx1-ubyte") for prefix in self.prefixes
        ]


class MNISTDataModule(IdxDataModule):
    """MNIST: 70,000 grey images of handwritten digits, 28 x 28 pixels, 10 classes.

    Inputs are float32 ``(B, 1, 28, 28)`` of mean 0 and standard deviation 1, targets int64 ``(B,)``.

    The FedBC paper: ``PowerLaw(20, C, e)`` with C of 1 to 3 and e of 1.1 to 1.5. Fed+: 1,000 clients of one digit each,
    ``ClassesPerClient(1000, 1, size_spread=2.0)``.

    Args:
        root: Folder that holds, or will hold, ``MNIST/raw``.
        partitioner: Which client has which images; None: ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Fetch the files if they are missing (11 MB).
        augment: Change the images of training batches: True moves each by up to 2 pixels; or as of
            :class:`CIFAR10DataModule`.
        transform: As of :class:`CIFAR10DataModule`.
        **kwargs: Of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Raises:
        ConfigurationError: The files are missing and cannot be downloaded, or one is damaged.
    """

    dataset_name = "MNIST"
    layout = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte (or the same with .gz)"
    mean = (0.1307,)
    std = (0.3081,)
    num_classes = 10
    prefixes = ("train", "t10k")

    def __init__(
        self,
        root: str = "data",
        partitioner: Partitioner | None = None,
        download: bool = True,
        augment: bool | nn.Module = False,
        transform: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, partitioner, download, augment, transform, **kwargs)


class CIFAR10DataModule(VisionDataModule):
    """CIFAR-10: 60,000 colour images, 32 x 32 pixels, 10 classes.

    Inputs are float32 ``(B, 3, 32, 32)`` of mean 0 and standard deviation 1 per channel, targets int64 ``(B,)``.

    Args:
        root: Folder that holds, or will hold, ``cifar-10-batches-py``.
        partitioner: Which client has which images; None: ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Fetch the files if they are missing (170 MB).
        augment: Change the images of training batches, uint8, each by its own draw from (seed, round, client, epoch,
            step). True: move each by up to 4 pixels in each direction (RandomCrop(32, padding=4)); False: do not; or
            any random transform of ``torchvision.transforms.v2``, also a ``Compose``, in YAML by its ``class_path``.
            Those of :mod:`fedbc_lightning.datamodules.transforms` take whole batches and are several times faster.
        transform: Of every batch, after it: any deterministic transform of ``torchvision.transforms.v2`` from uint8
            ``(B, 3, 32, 32)`` to floats; None: normalise.
        **kwargs: Of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Raises:
        ConfigurationError: The files are missing and cannot be downloaded, one is damaged, or a transform cannot be
            used.
    """

    dataset_name = "CIFAR10"
    layout = "cifar-10-batches-py/{data_batch_1..5,test_batch}"
    labels_key: ClassVar[str] = "labels"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def __init__(
        self,
        root: str = "data",
        partitioner: Partitioner | None = None,
        download: bool = True,
        augment: bool | nn.Module = True,
        transform: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, partitioner, download, augment, transform, **kwargs)

    def usual_augmentation(self) -> BatchAugmentation:
        """Images are moved by up to 4 pixels."""
        return RandomCrop(padding=4)

    def missing_file(self) -> Path | None:
        """The first file that is not there; None: all are."""
        return next((path for path, _ in self._files() if not path.is_file()), None)

    def check_files(self) -> None:
        """Compare every file with its checksum."""
        for path, checksum in self._files():
            _read_checked(path, checksum)

    def read(self) -> tuple[np.ndarray, np.ndarray, int]:
        """All images, training set first, uint8 ``(M, 3, 32, 32)``, their classes, ``(M,)``, and how many train."""
        with warnings.catch_warnings():
            # NumPy 2.4.0 to 2.4.4 on what an old NumPy wrote, https://github.com/pytorch/vision/issues/9340
            warnings.filterwarnings("ignore", r"dtype\(\): align should be passed")
            # encoding: the strings of Python 2
            parts = [pickle.loads(_read_checked(*file), encoding="latin1") for file in self._files()]
        images = np.concatenate([part["data"] for part in parts]).reshape(-1, 3, 32, 32)
        labels = [np.array(part[self.labels_key], dtype=np.int64) for part in parts]
        return images, np.concatenate(labels), sum(map(len, labels[:-1]))  # the last file is the test set

    def _files(self) -> list[tuple[Path, str]]:
        """The files that hold images, and their checksums."""
        from torchvision import datasets  # takes a second to import

        listed = getattr(datasets, self.dataset_name)
        return [(self.root / listed.base_folder / name, md5) for name, md5 in listed.train_list + listed.test_list]


class CIFAR100DataModule(CIFAR10DataModule):
    """CIFAR-100: 60,000 colour images, 32 x 32 pixels, 100 classes (the fine ones).

    Inputs are float32 ``(B, 3, 32, 32)`` of mean 0 and standard deviation 1 per channel, targets int64 ``(B,)``.
    FedLi: ``Dirichlet(100, alpha)``, 10 clients per round, ResNet-18 with GroupNorm. That paper names no augmentation;
    crops and mirror images are what ResNets are usually trained with on CIFAR.

    Args:
        root: Folder that holds, or will hold, ``cifar-100-python``.
        partitioner: Which client has which images; None: ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Fetch the files if they are missing (170 MB).
        augment: As of :class:`CIFAR10DataModule`, but True also mirrors every other image, left to right.
        transform: As of :class:`CIFAR10DataModule`.
        **kwargs: Of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Raises:
        ConfigurationError: As of :class:`CIFAR10DataModule`.
    """

    dataset_name = "CIFAR100"
    layout = "cifar-100-python/{train,test}"
    labels_key = "fine_labels"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)

    def usual_augmentation(self) -> BatchAugmentation:
        """Images are moved by up to 4 pixels, and mirrored."""
        return Compose([RandomCrop(padding=4), RandomHorizontalFlip()])


def _read_checked(path: Path, checksum: str) -> bytes:
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != checksum:
        raise damaged(path, "is not the original one (its MD5 checksum differs)")
    return content


@contextmanager
def _no_empty_folders_left(folder: Path) -> Iterator[None]:
    """If the block fails, remove the folders, down to this one, that it made and left empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        raise
