"""MNIST, CIFAR-10 and CIFAR-100, with training and test images pooled, as in the FedBC paper, or kept apart."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from fedbc_lightning.core.checks import check_arguments
from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import Partitioner, PowerLaw

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

OwnTest = Literal["split", "shared"]


class VisionDataModule(IndexedDataModule):
    """Base class for public sets of images that torchvision downloads and reads; they are held in memory as uint8.

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
        options: Arguments of that class.
        usual_augmentation: Augmentation that ``augment=True`` stands for.
        layout: Description of the expected files, for the message if they are missing.
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel, for pixels in [0, 1].
        other_way: Hint on how to keep the test images for testing, which is added to the line that says what was found.
    """

    dataset_name: ClassVar[str]
    usual_augmentation: ClassVar[BatchAugmentation]
    layout: str
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    other_way: ClassVar[str] = " (data.test: shared keeps the test images for testing)"

    def __init__(
        self,
        root: str | Path = "data",
        partitioner: Partitioner | None = None,
        download: bool = True,
        augment: bool | nn.Module = False,
        transform: nn.Module | None = None,
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
        self.options: dict[str, Any] = {}
        self.augment = as_augment(augment, self.usual_augmentation)
        self.transform = as_transform(transform, Normalize(self.mean, self.std))

    def tensors(self, part: Any) -> tuple[Tensor, Tensor]:
        """Return the images, uint8 ``(M, C, H, W)``, and the classes, int64 ``(M,)``, of a part that torchvision read.

        Args:
            part: Training or test data, an object of ``torchvision.datasets``.
        """
        return part.data[:, None], part.targets

    def prepare_data(self) -> None:
        """Download missing files, and check all files by reading them."""
        for train in (True, False):
            self._read(train)

    def load(self) -> LoadedData:
        """Return all images, training set first, or with ``test="shared"`` the training set and the test set apart."""
        # The public code of FedBC pools in this order, too, and its partition (PowerLaw with style "public") gives the
        # samples of a class in the order of the pooled data.
        parts = [self.tensors(self._read(train)) for train in (True, False)]
        images, targets = map(torch.cat, zip(*parts, strict=True))
        num_train = len(parts[0][1])
        found = f"{self.dataset_name}: {num_train:,} training and {len(targets) - num_train:,} test images"
        rank_zero_info(
            f"{found}; the training images are dealt out to the clients, the test images evaluate the global model."
            if self.test == "shared"
            else f"{found}, pooled and dealt out to the clients{self.other_way}."
        )
        check_transforms(images[:2], self.transform, self.augment)
        data = LoadedData(ArrayDataset((images, targets), None, self.transform, self.augment), targets.numpy())
        return data.with_shared_test(np.arange(len(targets)) >= num_train) if self.test == "shared" else data

    def _read(self, train: bool) -> Any:
        from torchvision import datasets  # takes a second to import

        kind = getattr(datasets, self.dataset_name)
        try:
            with warnings.catch_warnings():
                # NumPy 2.4.0 to 2.4.4 warns about arrays that an old NumPy pickled,
                # https://github.com/pytorch/vision/issues/9340
                warnings.filterwarnings("ignore", r"dtype\(\): align should be passed")
                return kind(self.root, train=train, download=self.download, **self.options)
        except Exception as error:  # a download, or reading what was downloaded, can fail in many ways
            raise ConfigurationError(
                f"data.root={str(self.root)!r}: {self.dataset_name} cannot be {'downloaded or ' * self.download}read "
                f"({first_line(error)}); expected {self.layout} in it; delete what is damaged"
            ) from error


class MNISTDataModule(VisionDataModule):
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
    usual_augmentation = RandomCrop(padding=2)
    layout = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"
    mean = (0.1307,)
    std = (0.3081,)


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
    usual_augmentation: ClassVar[BatchAugmentation] = RandomCrop(padding=4)
    layout = "cifar-10-batches-py/{data_batch_1..5,test_batch}"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def __init__(
        self,
        root: str | Path = "data",
        partitioner: Partitioner | None = None,
        download: bool = True,
        augment: bool | nn.Module = True,
        transform: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, partitioner, download, augment, transform, **kwargs)

    def tensors(self, part: Any) -> tuple[Tensor, Tensor]:
        """Return the images, uint8 ``(M, 3, 32, 32)``, and the classes, int64 ``(M,)``, of a part."""
        # Contiguous: torchvision turned rows of (C, H, W) into a view of (H, W, C), and batches are gathered faster
        return torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)


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
    usual_augmentation = Compose([RandomCrop(padding=4), RandomHorizontalFlip()])
    layout = "cifar-100-python/{train,test}"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
