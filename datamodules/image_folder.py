"""Data module for a tree of image files with one folder per class."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedbc_lightning.core.checks import Count, NotNegative, check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.printing import shown_progress
from fedbc_lightning.data import ArrayDataset, BatchTransformDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import Partitioner, PowerLaw

from .own_rows import shorten
from .transforms import Normalize, RandomCrop, as_augment, as_transform, check_transforms
from .vision import OwnTest

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")
LAYOUT = "expected <root>/<class>/*.jpg or <root>/{train,test}/<class>/*.jpg (also png, bmp, gif, ppm, tiff, webp)"


class ImageFolderDataModule(IndexedDataModule):
    """Federates images in folders: ``root/<class>/...``, or ``root/{train,val,test}/<class>/...``.

    Every image is decoded once, to uint8 in memory. If the images do not fit into memory, each is decoded when it is
    needed, and once before training, to find those that cannot be read or differ in size. Grey images of 16 bits are
    scaled to 8 bits (65535 becomes 255); images of 32 bits or of floats are refused, because it is unknown which value
    is white. Inputs are float32 ``(B, 3, H, W)``, or ``(B, 1, H, W)`` with ``grayscale``; targets are int64 ``(B,)``,
    the position of the class among the sorted names.

    Args:
        root: Folder of the tree.
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        image_size: Height and width in pixels to which images are scaled and centrally cropped; with None they are not
            scaled, and must all have the same size.
        grayscale: Whether inputs have one channel, the brightness; without it grey images, too, have the three equal
            channels of RGB.
        augment: Augmentation of training batches: True moves each image by up to an eighth of its width in each
            direction (4 pixels of 32), False changes none, and any augmentation of
            :class:`~fedbc_lightning.datamodules.CIFAR10DataModule` may be given.
        transform: Transform of every batch, see :class:`~fedbc_lightning.datamodules.CIFAR10DataModule`; None
            normalises by ``mean`` and ``std``.
        mean: Mean of each channel, or one number for all, for pixels in [0, 1]; it is subtracted.
        std: Standard deviation of each channel, or one number for all, for pixels in [0, 1]; pixels are divided by it.
        max_memory_gib: Largest memory that the images may fill, in GiB.
        test: Use of the folders. With ``"split"`` the images of all folders are pooled, and ``test_fraction`` of each
            client's images are its test data. With ``"shared"`` the images in ``test`` (or in ``val`` if there is no
            ``test``) evaluate the global model and belong to no client; clients get all others.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`; ``num_workers`` helps if images do not
            fit into memory.

    Attributes:
        classes: Sorted names of the classes; available after ``setup``.

    Raises:
        ConfigurationError: The folder is missing or not such a tree, a file cannot be read, or images differ in size.
    """

    def __init__(
        self,
        root: str | Path,
        partitioner: Partitioner | None = None,
        image_size: Count | None = None,
        grayscale: bool = False,
        augment: bool | nn.Module = False,
        transform: nn.Module | None = None,
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
        max_memory_gib: NotNegative = 4.0,
        test: OwnTest = "split",
        **kwargs: Any,
    ) -> None:
        check_arguments(ImageFolderDataModule, locals(), "data")
        super().__init__(partitioner or PowerLaw(20, classes_per_client=2, exponent=1.2), **kwargs)
        num_channels = 1 if grayscale else 3
        if not {len(mean), len(std)} <= {1, num_channels} or not all(value > 0 for value in std):
            raise ConfigurationError(
                f"data.mean={mean}, data.std={std}: give one number, or one for each of the {num_channels} channels of "
                "the images, std above 0"
            )
        self.image_size, self.grayscale, self.augment = image_size, grayscale, augment
        self.test = test
        if test == "shared":
            self.test_fraction = None
        self.root = Path(root).expanduser()
        self.transform = as_transform(transform, Normalize(mean, std))
        self.max_memory_gib = max_memory_gib
        self.classes: list[str] = []

    def prepare_data(self) -> None:
        """Check that the tree exists, and decode each image once if they will not be held in memory."""
        files = self._find().files
        if not self._fit(files):
            files.decode()

    def load(self) -> LoadedData:
        """Return the images and their classes, in the order of their paths."""
        files, self.classes, empty, folders = self._find()
        own_test = self._own_test(folders)
        nothing = f"; no images in: {shorten(empty)}" if empty else ""
        rank_zero_info(
            f"'{self.root}': {len(files):,} images of {len(self.classes):,} classes, {files.shape[1]} x "
            f"{files.shape[2]} pixels, {'grey' if self.grayscale else 'RGB'}: {shorten(self.classes)}{nothing}"
            f"{_fate(folders, own_test)}"
        )
        augment = as_augment(self.augment, RandomCrop(max(files.shape[-1] // 8, 1)))
        check_transforms(files[0][0][None], self.transform, augment)
        dataset: Dataset
        if self._fit(files):
            images = np.empty((len(files), *files.shape), dtype=np.uint8)
            files.decode(images)
            tensors = (torch.from_numpy(images), torch.from_numpy(files.targets))
            dataset = ArrayDataset(tensors, transform=self.transform, augment=augment)
        else:
            dataset = BatchTransformDataset(files, self.transform, augment)
        data = LoadedData(dataset, files.targets)
        return data if own_test is None else data.with_shared_test(np.array(folders) == own_test)

    def _fit(self, files: ImageFiles) -> bool:
        return files.num_bytes <= self.max_memory_gib * 2**30

    def _own_test(self, folders: list[str]) -> str | None:
        """Return the folder whose images are kept for testing, or None if all are pooled."""
        if self.test == "split":
            return None
        # From the last name, so that test goes before val
        folder = next((name for name in reversed(SPLIT_FOLDERS[1:]) if name in folders), None)
        if folder is None:
            raise ConfigurationError(
                f"data.test='shared': there is no folder test or val with images in {str(self.root)!r}; give 'split'"
            )
        return folder

    def _find(self) -> FoundImages:
        """Find the images of the tree, ordered by split, class and name.

        Raises:
            ConfigurationError: The folder is missing, or does not have images in folders of two classes or more.
        """
        root = self.root
        splits = [root / name for name in SPLIT_FOLDERS if (root / name).is_dir()]
        if not (root / "train").is_dir():
            splits = [root] if root.is_dir() else []
        folders = [folder for split in splits for folder in sorted(split.iterdir()) if folder.is_dir()]
        found = [(path, folder) for folder in folders for path in _images_under(folder)]
        classes = sorted({folder.name for _, folder in found})
        if len(classes) < 2:
            what = f"images of {len(classes)} classes" if splits else "no such folder"
            raise ConfigurationError(f"data.root={str(root)!r}: {what}; {LAYOUT}")
        labels = np.array([classes.index(folder.name) for _, folder in found], dtype=np.int64)
        files = ImageFiles([path for path, _ in found], labels, self.image_size, self.grayscale)
        empty = sorted({folder.name for folder in folders} - set(classes))
        return FoundImages(files, classes, empty, ["" if f.parent == root else f.parent.name for _, f in found])


class FoundImages(NamedTuple):
    """The images of a tree.

    Attributes:
        files: The images with their classes.
        classes: Sorted names of the classes.
        empty: Sorted names of the folders without images, which are no classes.
        folders: Split folder of each image, ``train``, ``test``, ...; an empty string if there are no such folders.
    """

    files: ImageFiles
    classes: list[str]
    empty: list[str]
    folders: list[str]


def _fate(folders: list[str], own_test: str | None) -> str:
    """Describe how the images of each split folder are used, for the line that says what was found."""
    counts = Counter(folders)
    if len(counts) < 2:
        return ""
    said = ", ".join(f"{name}/ ({count:,})" for name, count in counts.items() if name != own_test)
    if own_test is not None:
        return f"; {own_test}/ ({counts[own_test]:,}) evaluates the global model, the clients get {said}"
    return f"; {said} are pooled and dealt out to the clients (data.test: shared keeps {folders[-1]}/ for testing)"


def _images_under(folder: Path) -> list[Path]:
    # Ordered by the whole path: torchvision's ImageFolder lists the files of nested folders in another order, and the
    # order decides which client gets which image.
    names = (os.path.join(where, name) for where, _, files in os.walk(folder) for name in files)
    return [Path(name) for name in sorted(names) if os.path.splitext(name)[1].lower() in SUFFIXES]


FILES_AT_ONCE = 256  # per thread; of single files, starting the thread's work would cost as much as decoding them


class ImageFiles(Dataset):
    """Data set of images that are decoded when they are needed, with items ``(uint8 (C, H, W), class)``.

    Args:
        paths: Paths of the images.
        targets: Class of each image, ``(M,)``.
        image_size: Height and width to which images are scaled and centrally cropped; None does not scale.
        grayscale: Whether images have one channel, the brightness, in place of RGB's three.

    Attributes:
        shape: Shape of the first image, (C, H, W), which all others must have.
    """

    def __init__(self, paths: list[Path], targets: np.ndarray, image_size: int | None, grayscale: bool) -> None:
        self.paths, self.targets = paths, targets
        self.image_size, self.grayscale = image_size, grayscale
        self.shape = self.read(0).shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.read(index)), int(self.targets[index])

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all decoded images."""
        return len(self) * int(np.prod(self.shape))

    def read(self, index: int) -> np.ndarray:
        """Read an image, uint8 ``(C, H, W)``.

        Raises:
            ConfigurationError: The file is not a readable image, its pixels are 32-bit integers or floats, or its size
                is not that of the first image.
        """
        from PIL import Image, ImageOps

        path, size = self.paths[index], self.image_size
        try:
            with Image.open(path) as file:
                image = _converted(file, "L" if self.grayscale else "RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ConfigurationError(
                f"data.root: cannot read the image {str(path)!r} ({error}); mend or delete it"
            ) from error
        if size is not None and image.size != (size, size):
            image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
        # A copy in any case: Pillow's pixels cannot be written, and torch warns of tensors on such memory.
        pixels = np.array(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), order="C")
        if index and pixels.shape != self.shape:
            raise ConfigurationError(
                f"data.image_size: {str(path)!r} has {pixels.shape[1]} x {pixels.shape[2]} pixels, the first image "
                f"{self.shape[1]} x {self.shape[2]}; give image_size to scale all images"
            )
        return pixels

    def decode(self, images: np.ndarray | None = None) -> None:
        """Decode all images in threads into an array ``(M, C, H, W)``; without one they are only checked.

        Raises:
            ConfigurationError: A file cannot be read, or sizes differ.
        """

        def decode_some(start: int) -> None:
            for index in range(start, min(start + FILES_AT_ONCE, len(self))):
                pixels = self.read(index)
                if images is not None:
                    images[index] = pixels

        starts = range(0, len(self), FILES_AT_ONCE)
        with ThreadPoolExecutor() as threads:
            try:
                for _ in shown_progress(threads.map(decode_some, starts), "decoding images", len(starts)):
                    pass
            except BaseException:  # a bad file, or Ctrl-C: do not decode the rest first
                threads.shutdown(cancel_futures=True)
                raise


def _converted(file: PILImage, mode: str) -> PILImage:
    """Convert an opened image to a mode of 8 bits; PIL's ``convert`` alone would clip 16-bit values at 255."""
    from PIL import Image

    if file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PPM"):  # 16 bits of grey
        file = Image.fromarray(np.rint(np.asarray(file) / 257).astype(np.uint8))
    elif file.mode in ("I", "F"):
        raise ValueError(f"in Pillow's mode {file.mode} it is unknown which value is white: save it with 8 or 16 bits")
    return file.convert(mode)
