"""MNIST, CIFAR-10 and CIFAR-100, with training and test images pooled, as in the FedBC paper, or kept apart."""

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

from fedbc_lightning.core.checks import check_arguments
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
    """Base class for public sets of images, held in memory as uint8; a subclass names its files and reads them.

    torchvision is used only to download. Files are checked in ``prepare_data``, before anything is trained.

    Args:
        root: Folder of the files.
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Whether to download the files if they are missing.
        augment: Augmentation of training batches, see :class:`CIFAR10DataModule`.
        transform: Transform of every batch, see :class:`CIFAR10DataModule`.
        test: Use of the test images. With ``"split"`` they are pooled with the training images, and ``test_fraction``
            of each client's images are its test data. With ``"shared"`` clients get only training images, and the test
            images evaluate the global model; clients have no test data.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        dataset_name: Name of the class in ``torchvision.datasets``.
        layout: Description of the expected files, for the message if they are missing.
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel, for pixels in [0, 1].
        other_way: Hint on how to keep the test images for testing, which is added to the line that says what was found.
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
        check_arguments(VisionDataModule, locals(), "data")
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
        """Return the augmentation that ``augment=True`` stands for."""

    @abstractmethod
    def missing_file(self) -> Path | None:
        """Return the path of the first file that is missing, or None if all exist."""

    @abstractmethod
    def read(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Read all images, training set first.

        Returns:
            The images, uint8 ``(M, C, H, W)``, their classes, int64 ``(M,)``, and the size of the training set.

        Raises:
            ConfigurationError: A file is damaged.
        """

    @abstractmethod
    def check_files(self) -> None:
        """Check every file.

        Raises:
            ConfigurationError: A file is damaged.
        """

    def fetch(self) -> None:
        """Download the files with torchvision, which puts them where this class looks for them."""
        from torchvision import datasets  # takes a second to import

        getattr(datasets, self.dataset_name)(self.root, download=True)

    def prepare_data(self) -> None:
        """Download missing files, and check all files."""
        missing = self.missing_file()
        if missing is not None and self.download:
            try:
                with _no_empty_folders_left(missing.parent):
                    self.fetch()
            except Exception as error:  # a download can fail in many ways, each with an exception of its own
                raise self._not_there(f"could not be downloaded ({first_line(error)})") from error
            missing = self.missing_file()
        if missing is not None:
            why = "is not complete after its download" if self.download else "is not there, and download is false"
            raise self._not_there(f"{why} (no file {missing.name!r})")
        self.check_files()

    def load(self) -> LoadedData:
        """Return all images, training set first, or with ``test="shared"`` the training set and the test set apart."""
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
    """Base class for sets of grey images of 28 x 28 pixels in IDX files, plain or as downloaded (``.gz``).

    Attributes:
        num_classes: Number above all labels in the files, which begin with 0.
        prefixes: Beginnings of the names of the training files and of the test files.
    """

    num_classes: int
    prefixes: tuple[str, str]

    def usual_augmentation(self) -> BatchAugmentation:
        """Return an augmentation that moves images by up to 2 pixels."""
        return RandomCrop(padding=2)

    def missing_file(self) -> Path | None:
        """Return the path of the first file that is missing, or None if all exist."""
        return next((path for pair in self._files() for path in pair if find_idx(path) is None), None)

    def check_files(self) -> None:
        """Check every file; the pixels of files that are not compressed are not read."""
        self._parts()

    def read(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Read all images, training set first.

        Returns:
            The images, uint8 ``(M, 1, 28, 28)``, their classes, int64 ``(M,)``, and the size of the training set.
        """
        images, labels = zip(*self._parts(), strict=True)
        return np.concatenate(images)[:, None], np.concatenate(labels).astype(np.int64), len(labels[0])

    def _parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Read and check the images and labels of the training set and of the test set."""
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

    The FedBC paper uses ``PowerLaw(20, C, e)`` with C of 1 to 3 and e of 1.1 to 1.5. Fed+ uses 1,000 clients of one
    digit each, ``ClassesPerClient(1000, 1, size_spread=2.0)``.

    Args:
        root: Folder that holds, or will hold, ``MNIST/raw``.
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Whether to download the files if they are missing (11 MB).
        augment: Augmentation of training batches: True moves each image by up to 2 pixels, False changes none, and any
            augmentation of :class:`CIFAR10DataModule` may be given.
        transform: Transform of every batch, see :class:`CIFAR10DataModule`; None normalises.
        **kwargs: Further arguments of :class:`CIFAR10DataModule`, such as ``test`` and ``batch_size``.

    Raises:
        ConfigurationError: The files are missing and cannot be downloaded, a file is damaged, or a transform cannot be
            used.
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
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Whether to download the files if they are missing (170 MB).
        augment: Augmentation of training batches, uint8; it changes each image by a draw from (seed, round, client,
            epoch, step). True moves each image by up to 4 pixels in each direction (RandomCrop(32, padding=4)), and
            False changes none. Any random transform of ``torchvision.transforms.v2`` may be given, also a ``Compose``,
            in YAML by its ``class_path``; those of :mod:`fedbc_lightning.datamodules.transforms` work on whole batches
            and are several times faster.
        transform: Transform of every batch after the augmentation: any deterministic transform of
            ``torchvision.transforms.v2`` from uint8 ``(B, 3, 32, 32)`` to floats; None normalises.
        **kwargs: Argument ``test`` of :class:`~fedbc_lightning.datamodules.vision.VisionDataModule`, and arguments of
            :class:`~fedbc_lightning.data.IndexedDataModule`.

    Raises:
        ConfigurationError: The files are missing and cannot be downloaded, a file is damaged, or a transform cannot be
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
        """Return an augmentation that moves images by up to 4 pixels."""
        return RandomCrop(padding=4)

    def missing_file(self) -> Path | None:
        """Return the path of the first file that is missing, or None if all exist."""
        return next((path for path, _ in self._files() if not path.is_file()), None)

    def check_files(self) -> None:
        """Compare every file with its checksum."""
        for path, checksum in self._files():
            _read_checked(path, checksum)

    def read(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Read all images, training set first.

        Returns:
            The images, uint8 ``(M, 3, 32, 32)``, their classes, int64 ``(M,)``, and the size of the training set.
        """
        with warnings.catch_warnings():
            # NumPy 2.4.0 to 2.4.4 warns about arrays that an old NumPy pickled,
            # https://github.com/pytorch/vision/issues/9340
            warnings.filterwarnings("ignore", r"dtype\(\): align should be passed")
            # Python 2 wrote the files, and its strings are bytes: hence the encoding.
            parts = [pickle.loads(_read_checked(*file), encoding="latin1") for file in self._files()]
        images = np.concatenate([part["data"] for part in parts]).reshape(-1, 3, 32, 32)
        labels = [np.array(part[self.labels_key], dtype=np.int64) for part in parts]
        return images, np.concatenate(labels), sum(map(len, labels[:-1]))  # the last file is the test set

    def _files(self) -> list[tuple[Path, str]]:
        """Return the paths of the files with images, and their checksums."""
        from torchvision import datasets  # takes a second to import

        listed = getattr(datasets, self.dataset_name)
        return [(self.root / listed.base_folder / name, md5) for name, md5 in listed.train_list + listed.test_list]


class CIFAR100DataModule(CIFAR10DataModule):
    """CIFAR-100: 60,000 colour images, 32 x 32 pixels, 100 classes (the fine ones).

    Inputs are float32 ``(B, 3, 32, 32)`` of mean 0 and standard deviation 1 per channel, targets int64 ``(B,)``.
    FedLi uses ``Dirichlet(100, alpha)``, 10 clients per round and ResNet-18 with GroupNorm. That paper names no
    augmentation; ResNets are usually trained with crops and mirror images on CIFAR.

    Args:
        root: Folder that holds, or will hold, ``cifar-100-python``.
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Whether to download the files if they are missing (170 MB).
        augment: Augmentation of training batches, see :class:`CIFAR10DataModule`; True also mirrors images, left to
            right, with probability 0.5.
        transform: Transform of every batch, see :class:`CIFAR10DataModule`; None normalises.
        **kwargs: Further arguments of :class:`CIFAR10DataModule`.

    Raises:
        ConfigurationError: The files are missing and cannot be downloaded, a file is damaged, or a transform cannot be
            used.
    """

    dataset_name = "CIFAR100"
    layout = "cifar-100-python/{train,test}"
    labels_key = "fine_labels"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)

    def usual_augmentation(self) -> BatchAugmentation:
        """Return an augmentation that moves images by up to 4 pixels and mirrors half of them."""
        return Compose([RandomCrop(padding=4), RandomHorizontalFlip()])


def _read_checked(path: Path, checksum: str) -> bytes:
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != checksum:
        raise damaged(path, "is not the original one (its MD5 checksum differs)")
    return content


@contextmanager
def _no_empty_folders_left(folder: Path) -> Iterator[None]:
    """If the code inside the context fails, remove the empty folders that it created above and at ``folder``."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        raise
