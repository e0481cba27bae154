"""Data module for a tree of image files with one folder per class."""

from __future__ import annotations

import errno
import math
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedbc_lightning.core.checks import Count, NotNegative, check_arguments
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import told
from fedbc_lightning.core.printing import shown_progress
from fedbc_lightning.core.units import bytes_said
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import Partitioner, PowerLaw

from .own_rows import shorten
from .transforms import Normalize, RandomCrop, WholeBatch, as_augment, check_transforms
from .vision import OwnTest

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

FILES_AT_ONCE = 256  # per thread; of single files, starting the thread's work would cost as much as decoding them
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")
LAYOUT = "expected <root>/<class>/*.jpg or <root>/{train,test}/<class>/*.jpg (also png, bmp, gif, ppm, tiff, webp)"


class ImageFolderDataModule(IndexedDataModule):
    """Federates images in folders: ``root/<class>/...``, or ``root/{train,val,test}/<class>/...``.

    Every image is decoded once at the start, to uint8 in memory, or in a temporary file if they do not fit. Grey images
    of 16 bits are scaled to 8 bits (65535 becomes 255); images of 32 bits or of floats are refused, because it is
    unknown which value is white. Inputs are float32 ``(B, 3, H, W)``, or ``(B, 1, H, W)`` with ``grayscale``; targets
    are int64 ``(B,)``, the position of the class among the sorted names.

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
        max_memory_gib: Largest memory that the images may fill, in GiB; larger sets lie in a temporary file in
            ``$TMPDIR``, of which the operating system keeps as much in memory as there is room.
        test: Use of the folders. With ``"split"`` the images of all folders are pooled, and ``test_fraction`` of each
            client's images are its test data. With ``"shared"`` the images in ``test`` (or in ``val`` if there is no
            ``test``) evaluate the global model and belong to no client; clients get all others.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        classes: Sorted names of the classes; available after ``setup``.

    Raises:
        ConfigurationError: The folder is missing or not such a tree, a file cannot be read, images differ in size, or
            they fit neither into memory nor into the temporary folder.
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
        self.transform = Normalize(mean, std) if transform is None else WholeBatch(transform)
        self.max_memory_gib = max_memory_gib
        self.classes: list[str] = []

    def load(self) -> LoadedData:
        """Return the images and their classes, in the order of their paths."""
        paths, labels, folders = self._find()
        own_test = self._own_test(folders)
        num_channels, height, width = self._read(paths[0]).shape
        counts = ", ".join(f"{name}/ ({count:,})" for name, count in Counter(folders).items() if name)
        fate = f"{own_test}/ evaluates the global model" if own_test else "all are pooled (data.test: split)"
        rank_zero_info(
            f"'{self.root}': {len(paths):,} images of {len(self.classes):,} classes, {height} x {width} pixels, "
            f"{'grey' if self.grayscale else 'RGB'}: {shorten(self.classes)}{f'; of {counts} {fate}' * bool(counts)}"
        )
        augment = as_augment(self.augment, RandomCrop(max(width // 8, 1)))
        check_transforms(torch.from_numpy(self._read(paths[0])[None]), self.transform, augment)
        tensors = torch.from_numpy(self._decode(paths, (num_channels, height, width))), torch.from_numpy(labels)
        data = LoadedData(ArrayDataset(tensors, transform=self.transform, augment=augment), labels)
        return data.with_test(np.array([folder == own_test for folder in folders]), is_shared=True)

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

    def _find(self) -> tuple[list[Path], np.ndarray, list[str]]:
        """Find the images of the tree, ordered by split, class and name.

        Returns:
            The paths of the images, the class of each, int64 ``(M,)``, and its split folder, ``train``, ``test``, ...;
            an empty string if there are no such folders.

        Raises:
            ConfigurationError: The folder is missing, or does not have images in folders of two classes or more.
        """
        root = self.root
        splits = [root / name for name in SPLIT_FOLDERS if (root / name).is_dir()]
        if not (root / "train").is_dir():
            splits = [root] if root.is_dir() else []
        folders = [folder for split in splits for folder in sorted(split.iterdir()) if folder.is_dir()]
        found = [(path, folder) for folder in folders for path in _images_under(folder)]
        self.classes = sorted({folder.name for _, folder in found})
        if len(self.classes) < 2:
            what = f"images of {len(self.classes)} classes" if splits else "no such folder"
            raise ConfigurationError(f"data.root={str(root)!r}: {what}; {LAYOUT}")
        labels = np.array([self.classes.index(folder.name) for _, folder in found], dtype=np.int64)
        splits_of = ["" if folder.parent == root else folder.parent.name for _, folder in found]
        return [path for path, _ in found], labels, splits_of

    def _read(self, path: Path) -> np.ndarray:
        """Read an image, uint8 ``(C, H, W)``.

        Raises:
            ConfigurationError: The file is not a readable image, or its pixels are 32-bit integers or floats.
        """
        from PIL import Image, ImageOps

        size = self.image_size
        try:
            with Image.open(path) as file:
                image = _converted(file, "L" if self.grayscale else "RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ConfigurationError(f"data.root: cannot read the image '{path}' ({error}); replace it") from error
        if size is not None and image.size != (size, size):
            image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
        # A copy in any case: Pillow's pixels cannot be written, and torch warns of tensors on such memory.
        return np.array(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), order="C")

    def _decode(self, paths: list[Path], shape: tuple[int, ...]) -> np.ndarray:
        """Decode all images, uint8 ``(M, C, H, W)``, in threads.

        Args:
            paths: Paths of the images.
            shape: Shape of the first image, which all others must have.

        Raises:
            ConfigurationError: A file cannot be read, or sizes differ.
        """
        whole = (len(paths), *shape)
        fits = math.prod(whole) <= self.max_memory_gib * 2**30
        images = np.empty(whole, dtype=np.uint8) if fits else _mapped(whole)

        def decode_some(start: int) -> None:
            for index in range(start, min(start + FILES_AT_ONCE, len(paths))):
                pixels = self._read(paths[index])
                if pixels.shape != shape:
                    raise ConfigurationError(
                        f"data.image_size: {str(paths[index])!r} has {pixels.shape[1]} x {pixels.shape[2]} pixels, the "
                        f"first image {shape[1]} x {shape[2]}; give image_size to scale all images"
                    )
                images[index] = pixels

        starts = range(0, len(paths), FILES_AT_ONCE)
        with ThreadPoolExecutor() as threads:
            try:
                for _ in shown_progress(threads.map(decode_some, starts), "decoding images", len(starts)):
                    pass
            except BaseException:  # a bad file, or Ctrl-C: do not decode the rest first
                threads.shutdown(cancel_futures=True)
                raise
        return images


def _mapped(shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of bytes in a temporary file, for which room is reserved.

    Raises:
        ConfigurationError: There is not enough room in the folder of temporary files.
    """
    folder, size = Path(gettempdir()), math.prod(shape)
    needed = f"{shape[0]:,} images above this limit need {bytes_said(size)} there"
    do = f"{needed}; set TMPDIR to a folder with more room, raise max_memory_gib, or lower data.image_size."
    # The system removes the file when the array is gone, and drops its pages from memory when it needs room.
    with told(folder, do, "data.max_memory_gib"), TemporaryFile(dir=folder) as file:
        # A mapped file has holes where nothing was written yet. If there is no room left to fill one, the system kills
        # the process by SIGBUS, without a word, so all room is taken now.
        if disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(file.fileno(), 0, size)  # a quota, too, ends here
        return np.memmap(file, dtype=np.uint8, mode="w+", shape=shape)


def _images_under(folder: Path) -> list[Path]:
    # Ordered by the whole path: torchvision's ImageFolder lists the files of nested folders in another order, and the
    # order decides which client gets which image.
    names = (os.path.join(where, name) for where, _, files in os.walk(folder) for name in files)
    return [Path(name) for name in sorted(names) if os.path.splitext(name)[1].lower() in SUFFIXES]


def _converted(file: PILImage, mode: str) -> PILImage:
    """Convert an opened image to a mode of 8 bits; PIL's ``convert`` alone would clip 16-bit values at 255."""
    from PIL import Image

    if file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PPM"):  # 16 bits of grey
        file = Image.fromarray(np.rint(np.asarray(file) / 257).astype(np.uint8))
    elif file.mode in ("I", "F"):
        raise ValueError(f"in Pillow's mode {file.mode} it is unknown which value is white: save it with 8 or 16 bits")
    return file.convert(mode)
