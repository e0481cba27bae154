"""Public sets of small images: MNIST and Fed+'s variants of it, CIFAR, EMNIST, and scikit-learn's digits."""

from __future__ import annotations

import warnings
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedbc_lightning.core import seeding
from fedbc_lightning.core.checks import Count, FiniteNotNegative, UnitInterval
from fedbc_lightning.core.errors import ConfigurationError, in_one_line
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import IID, Partition, Partitioner, PowerLaw

from . import transforms

OwnTest = Literal["split", "shared"]


class VisionDataModule(IndexedDataModule):
    """Base class for public sets of images that torchvision downloads and reads; they are held in memory as uint8.

    Args:
        root: Folder of the files.
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        download: Whether to download the files if they are missing.
        augment: Augmentation of training batches, see :class:`CIFAR10DataModule`; None is True for CIFAR, else False.
        transform: Transform of every batch, see :class:`CIFAR10DataModule`.
        test: Use of the test images. With ``"split"`` they are pooled with the training images, and ``test_fraction``
            of each client's images are its test data. With ``"shared"`` clients get only training images, and the test
            images evaluate the global model; clients have no test data.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        dataset_name: Name of the class in ``torchvision.datasets``.
        options: Arguments of that class.
        usual_augmentation: Augmentation that ``augment=True`` stands for.
        augments: Whether ``augment`` is True by default.
        layout: Description of the expected files, for the message if they are missing.
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel, for pixels in [0, 1].
        other_way: Hint on how to keep the test images for testing, which is added to the line that says what was found.
    """

    dataset_name: ClassVar[str]
    usual_augmentation: ClassVar[transforms.BatchAugmentation]
    augments: ClassVar[bool] = False
    layout: str
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    other_way: ClassVar[str] = " (data.test: shared keeps the test images for testing)"

    def __init__(
        self,
        root: str | Path = "data",
        partitioner: Partitioner | None = None,
        download: bool = True,
        augment: bool | nn.Module | None = None,
        transform: nn.Module | None = None,
        test: OwnTest = "split",
        **kwargs: Any,
    ) -> None:
        super().__init__(partitioner or PowerLaw(20, classes_per_client=2, exponent=1.2), **kwargs)
        self.test = test
        if test == "shared":
            self.test_fraction = None
        self.root = Path(root).expanduser()
        self.download = download
        self.options: dict[str, Any] = {}
        self.augment = transforms.as_augment(self.augments if augment is None else augment, self.usual_augmentation)
        usual = transforms.Normalize(self.mean, self.std)
        self.transform = usual if transform is None else transforms.WholeBatch(transform)

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
        transforms.check_transforms(images[:2], self.transform, self.augment)
        data = LoadedData(ArrayDataset((images, targets), None, self.transform, self.augment), targets.numpy())
        return data.with_test((np.arange(len(targets)) >= num_train) & (self.test == "shared"), is_shared=True)

    def _read(self, train: bool) -> Any:
        from torchvision import datasets  # takes a second to import

        kind = getattr(datasets, self.dataset_name)
        what = f"{self.dataset_name} cannot be {'downloaded or ' * self.download}read"
        advice = f"); expected {self.layout} in it; delete what is damaged"
        with in_one_line(f"data.root={str(self.root)!r}: {what} (", advice), warnings.catch_warnings():
            # NumPy 2.4.0 to 2.4.4 warns about arrays that an old NumPy pickled,
            # https://github.com/pytorch/vision/issues/9340
            warnings.filterwarnings("ignore", r"dtype\(\): align should be passed")
            return kind(self.root, train=train, download=self.download, **self.options)


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
    usual_augmentation = transforms.RandomCrop(padding=2)
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
            epoch, step). True, the default, moves each image by up to 4 pixels in each direction (RandomCrop(32,
            padding=4)), and False changes none. Any random transform of ``torchvision.transforms.v2`` may be given,
            also a ``Compose``, in YAML by its ``class_path``; those of
            :mod:`fedbc_lightning.datamodules.transforms` work on whole batches and are several times faster.
        transform: Transform of every batch after the augmentation: any deterministic transform of
            ``torchvision.transforms.v2`` from uint8 ``(B, 3, 32, 32)`` to floats; None normalises.
        **kwargs: Argument ``test`` of :class:`~fedbc_lightning.datamodules.vision.VisionDataModule`, and arguments of
            :class:`~fedbc_lightning.data.IndexedDataModule`.

    Raises:
        ConfigurationError: The files are missing and cannot be downloaded, a file is damaged, or a transform cannot be
            used.
    """

    dataset_name = "CIFAR10"
    augments = True
    usual_augmentation: ClassVar[transforms.BatchAugmentation] = transforms.RandomCrop(padding=4)
    layout = "cifar-10-batches-py/{data_batch_1..5,test_batch}"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def tensors(self, part: Any) -> tuple[Tensor, Tensor]:
        """Return the images, uint8 ``(M, 3, 32, 32)``, and the classes, int64 ``(M,)``, of a part."""
        self.classes = part.classes
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
    usual_augmentation = transforms.Compose([transforms.RandomCrop(padding=4), transforms.RandomHorizontalFlip()])
    layout = "cifar-100-python/{train,test}"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)


Split = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]
NUM_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


class EMNISTDataModule(VisionDataModule):
    """EMNIST (Cohen et al. 2017): grey images of handwritten characters, 28 x 28 pixels, in six splits.

    Inputs are float32 ``(B, 1, 28, 28)`` of mean about 0 and standard deviation about 1, targets int64 ``(B,)``. The
    files hold images with rows and columns swapped; this class turns them upright.

    The split ``byclass`` (814,255 images) has 62 classes: the digits (0-9), the capital letters (10-35) and the
    lower-case letters (36-61). ``bymerge`` (814,255) and ``balanced`` (131,600) have 47 classes, in which the two cases
    of similar letters are merged. ``letters`` (145,600) has 26 classes with both cases merged, counted from 0 here and
    from 1 in the file. ``digits`` (280,000) and ``mnist`` (70,000) have 10.

    Args:
        root: Folder that holds, or will hold, ``EMNIST/raw``.
        split: Split of EMNIST, which determines images and classes.
        classes: Classes of the split to keep, relabelled 0, 1, ... in this order; None keeps all.
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        **kwargs: Further arguments of :class:`~fedbc_lightning.datamodules.MNISTDataModule`, such as ``download``
            (0.6 GB for all splits; 1.8 GB more when unpacked), ``test`` and ``batch_size``.

    Attributes:
        characters: Character of each kept class; available after ``setup``.

    Raises:
        ConfigurationError: A class is not one of the split, the files are missing and cannot be downloaded, or a file
            is damaged.

    Example:
        Fed+ makes its FEMNIST from the lower-case letters a to j, with five of them at each of 200 clients.

        >>> from fedbc_lightning.partition import ClassesPerClient
        >>> data = EMNISTDataModule(split="byclass", classes=[*range(36, 46)], partitioner=ClassesPerClient(200, 5))
        >>> data.num_clients
        200
    """

    dataset_name = "EMNIST"
    usual_augmentation = transforms.RandomCrop(padding=2)
    mean = (0.1736,)  # the mean of byclass; those of the other splits differ by 0.002
    std = (0.3317,)

    def __init__(
        self,
        root: str | Path = "data",
        split: Split = "byclass",
        classes: list[int] | None = None,
        partitioner: Partitioner | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, partitioner, **kwargs)
        self.options = {"split": split}
        self.characters: list[str] = []
        self.layout = f"EMNIST/raw/emnist-{split}-{{train,test}}-{{images-idx3,labels-idx1}}-ubyte"
        count = NUM_CLASSES[split]
        self.classes = list(range(count)) if classes is None else list(classes)
        kept = set(self.classes)
        if not kept or len(kept) < len(self.classes) or not kept <= set(range(count)):
            raise ConfigurationError(f"data.classes={classes}: give some of the classes 0 to {count - 1}, each once")

    @property
    def class_names(self) -> list[str] | None:
        """The characters."""
        return self.characters or None

    def tensors(self, part: Any) -> tuple[Tensor, Tensor]:
        """Return upright images of the kept classes, uint8 ``(M, 1, 28, 28)``, and their new classes ``(M,)``."""
        # The files of this split alone count classes from 1; classes that are not kept become -1.
        first_label = 1 if self.options["split"] == "letters" else 0
        self.characters = [part.classes[first_label + number] for number in self.classes]
        new_number = torch.full((first_label + NUM_CLASSES[self.options["split"]],), -1)
        new_number[first_label + torch.tensor(self.classes)] = torch.arange(len(self.classes))
        targets = new_number[part.targets]
        kept = targets >= 0
        # The files hold each image column by column.
        return part.data[kept].transpose(1, 2).contiguous()[:, None], targets[kept]


class DigitsDataModule(IndexedDataModule):
    """1,797 grey images of 8 x 8 pixels in 10 classes (``sklearn.datasets.load_digits``), over 10 unequal clients.

    Inputs are float32 ``(B, 1, 8, 8)`` in [0, 1], targets int64 ``(B,)``.

    Args:
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(10, classes_per_client=2, exponent=1.2)``, with 10 clients of 68 to 354 images.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Example:
        >>> data = DigitsDataModule(seed=0)
        >>> data.setup()
        >>> int(data.num_samples("train").sum() + data.num_samples("test").sum())
        1797
    """

    def __init__(self, partitioner: Partitioner | None = None, **kwargs: Any) -> None:
        super().__init__(partitioner or PowerLaw(10, classes_per_client=2, exponent=1.2), **kwargs)

    def load(self) -> LoadedData:
        """Return the images as uint8 (pixel values 0..16), and their digits."""
        images, digits = read_digits()
        tensors = (torch.from_numpy(images).view(-1, 1, 8, 8), torch.from_numpy(digits))
        # A pixel counts the black dots of a block of 4 x 4, so it is 0..16.
        return LoadedData(ArrayDataset(tensors, transform=transforms.Scale(1 / 16)), digits)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 ``(1797, 64)``, and their digits, int64 ``(1797,)``.

    They are read from scikit-learn's file directly, because importing scikit-learn, which imports pandas, takes 0.6 s.
    """
    path = str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz"))
    table = np.loadtxt(path, delimiter=",", dtype=np.int64)
    return table[:, :-1].astype(np.uint8), table[:, -1].copy()  # a view would keep the whole table


NUM_DIGITS = 10
NUM_NOISY_CLASSES = 2


class MNISTRobustDataModule(MNISTDataModule):
    """MNIST-robust of the Fed+ paper (section 5.1), in which some clients have negatives.

    All 70,000 images are assigned at random in equal parts. A part of the clients, drawn at random, has its images
    turned into ``255 - pixel``, in training and test data alike. Each client's data are split 50/50. The paper uses
    N = 10 with 10 % or N = 50 with 20 % of negatives, logistic regression, batches of 20, lr 0.02, σ = 15 (Fed+'s
    penalty), 20 local steps, 500 rounds of 10 clients, and the mean over 5 seeds.

    The paper does not say whether the equal parts are random, whether MNIST's own test images take part, how negated
    clients are chosen, and how pixels are scaled. Here negatives are normalised like all other images, by the mean and
    standard deviation of MNIST (the mean of a negative is then about 2.4).

    Args:
        root: Folder that holds, or will hold, ``MNIST/raw``.
        num_clients: Number of clients N, at least 1; 10 or 50 in the paper.
        negated_fraction: Fraction of the clients with negatives, in [0, 1], rounded to whole clients, but at least one
            if the fraction is above 0. None is the paper's: 0.2 for N = 50, else 0.1.
        test_fraction: Fraction of each client's samples that are its test data, in (0, 1).
        download: Whether to download the files if they are missing (11 MB).
        **kwargs: Arguments of :class:`~fedbc_lightning.datamodules.MNISTDataModule`.

    Attributes:
        negated_clients: Clients with negatives, int64, ascending; available after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, or :class:`~fedbc_lightning.datamodules.MNISTDataModule` cannot
            get its files.
    """

    negated_clients: np.ndarray
    other_way = ""

    def __init__(
        self,
        root: str | Path = "data",
        num_clients: Count = 10,
        negated_fraction: UnitInterval | None = None,
        test_fraction: float = 0.5,
        download: bool = True,
        **kwargs: Any,
    ) -> None:
        if negated_fraction is None:
            # Fed+, section 5.1: 10 % of 10 clients, 20 % of 50
            negated_fraction = 0.2 if num_clients == 50 else 0.1
        super().__init__(root, IID(num_clients), download, test="split", test_fraction=test_fraction, **kwargs)
        self.negated_fraction = negated_fraction

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """Return the images, with those of negated clients turned into negatives."""
        rng = seeding.numpy_generator(self.split_seed, "negate")
        count = max(round(self.negated_fraction * len(partition)), int(self.negated_fraction > 0))
        self.negated_clients = np.sort(rng.choice(len(partition), count, replace=False))
        assert isinstance(data.dataset, ArrayDataset)
        images, labels = data.dataset.pool.tensors
        rows = partition.indices[np.isin(partition.client_of_each(), self.negated_clients)]
        images[torch.from_numpy(rows)] = 255 - images[torch.from_numpy(rows)]
        return ArrayDataset((images, labels), transform=self.transform, augment=self.augment)


class MNISTPersonalDataModule(MNISTRobustDataModule):
    """MNIST-personal of the Fed+ paper (section 5.1), with the negatives of MNIST-robust and noise at each client.

    For every client two classes are drawn at random. Each pixel of their images gets Laplace noise, in training and
    test data alike; it is drawn once per image (not per batch), and not clipped to the range of pixels. Everything else
    is as in :class:`MNISTRobustDataModule`. The paper leaves open the points named there, and also the scale of the
    noise and whether the two classes are random.

    Images are held as int16, in units of 1/255, because noisy ones leave 0..255 and float32 would take twice the memory
    (110 MB for all). Noise is therefore rounded to whole units, and the largest pixel is 128 times white. torchvision
    interprets int16 as a wider range of brightness, so this class has no ``augment`` and ``transform``.

    Args:
        root: Folder that holds, or will hold, ``MNIST/raw``.
        num_clients: Number of clients N, at least 1; 10 or 50 in the paper.
        noise_scale: Scale of the Laplace distribution (its mean absolute value), for pixels in [0, 1], at least 0.
        negated_fraction: Fraction of the clients with negatives, in [0, 1], rounded to whole clients, but at least one
            if the fraction is above 0. None is the paper's: 0.2 for N = 50, else 0.1.
        **kwargs: Further arguments of :class:`MNISTRobustDataModule`.

    Attributes:
        negated_clients: Clients with negatives, int64, ascending; available after ``setup``.
        noisy_classes: The two noisy classes of each client, int64 ``(N, 2)``, ascending; available after ``setup``.

    Raises:
        ConfigurationError: An argument is impossible, or the files are missing or damaged.
    """

    noisy_classes: np.ndarray

    def __init__(
        self,
        root: str | Path = "data",
        num_clients: Count = 10,
        noise_scale: FiniteNotNegative = 0.5,
        negated_fraction: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, num_clients, negated_fraction, augment=False, transform=None, **kwargs)
        self.noise_scale = noise_scale

    def alter(self, data: LoadedData, partition: Partition) -> Dataset:
        """Return the images, with those of negated clients turned into negatives, and noise on the noisy classes."""
        dataset = super().alter(data, partition)
        assert isinstance(dataset, ArrayDataset)
        rng = seeding.numpy_generator(self.split_seed, "noise")
        drawn = [rng.choice(NUM_DIGITS, NUM_NOISY_CLASSES, replace=False) for _ in range(len(partition))]
        self.noisy_classes = np.sort(drawn, axis=1)
        pixels, labels = dataset.pool.tensors
        images = pixels.to(torch.int16)
        noisy = self.noisy_classes[partition.client_of_each()] == labels.numpy()[partition.indices, None]
        for rows in torch.from_numpy(partition.indices[noisy.any(axis=1)]).split(1024):
            noise = np.rint(rng.laplace(0, 255 * self.noise_scale, (len(rows), *images.shape[1:])))
            images[rows] = (images[rows] + torch.from_numpy(noise)).clamp(-(2**15), 2**15 - 1).to(torch.int16)
        return ArrayDataset((images, labels), transform=self.transform)
