"""Data module for a tree of image files with one folder per class."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.utils.data import Dataset

from fedbc_lightning.core.checks import check_at_least, check_choice
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, BatchTransformDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import Partitioner, PowerLaw

from .findings import shorten
from .image_cache import ImageCache
from .image_files import ImageFiles, ImageForm, decode_images, is_grey, read_image
from .own_test import OwnTest, keep_own_test
from .transforms import Normalize, RandomCrop, as_augment, as_transform, check_transforms

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")
LAYOUT = "expected <root>/<class>/*.jpg or <root>/{train,test}/<class>/*.jpg (also png, bmp, gif, ppm, tiff, webp)"


class ImageFolderDataModule(IndexedDataModule):
    """Federates images in folders: ``root/<class>/...``, or ``root/{train,val,test}/<class>/...``.

    Every image is decoded once, to uint8 in memory, and kept on the disk for the next start, see ``cache``. If the
    images do not fit into memory, each is decoded when it is needed, and once before training, to find those that
    cannot be read or differ in size. Grey images of 16 bits are scaled to 8 bits (65535 becomes 255); images of 32 bits
    or of floats are refused, because it is unknown which value is white. Inputs are float32 ``(B, 3, H, W)``, or
    ``(B, 1, H, W)`` with ``grayscale``; targets are int64 ``(B,)``, the position of the class among the sorted names.

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
        num_threads: Number of threads that decode images; None is one per CPU core.
        cache: Whether decoded images that fit into memory are kept on the disk for the next start: True keeps them in
            the user's cache folder, which holds at most 8 GiB of them, False keeps none, and a path is another folder.
            They are decoded again after any file was added, removed or changed.
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
        root: str,
        partitioner: Partitioner | None = None,
        image_size: int | None = None,
        grayscale: bool = False,
        augment: bool | nn.Module = False,
        transform: nn.Module | None = None,
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
        max_memory_gib: float = 4.0,
        num_threads: int | None = None,
        cache: bool | str = True,
        test: OwnTest = "split",
        **kwargs: Any,
    ) -> None:
        check_choice("data.test", test, ("split", "shared"))
        super().__init__(partitioner or PowerLaw(20, classes_per_client=2, exponent=1.2), **kwargs)
        if image_size is not None and image_size < 1:
            raise ConfigurationError(f"data.image_size={image_size}: give 1 or more pixels")
        self.form, self.augment = ImageForm(image_size, grayscale), augment
        _check_channels(mean, std, self.form.num_channels)
        self.test = test
        if test == "shared":
            self.test_fraction = None
        self.root = Path(root).expanduser()
        self.transform = as_transform(transform, Normalize(mean, std))
        check_at_least("data.max_memory_gib", max_memory_gib, 0)
        if num_threads is not None:
            check_at_least("data.num_threads", num_threads, 1, whole=True)
        self.max_memory_gib = max_memory_gib
        self.num_threads, self.cache = num_threads, cache
        self.classes: list[str] = []

    def prepare_data(self) -> None:
        """Check that the tree exists, and decode each image once if they will not be held in memory."""
        paths = find_images(self.root).paths
        if not self._fit(paths):
            decode_images(paths, self.form, self.num_threads)

    def load(self) -> LoadedData:
        """Return the images and their classes, in the order of their paths."""
        found = find_images(self.root)
        paths, labels, self.classes, empty, folders = found
        nothing = f"; no images in: {shorten(empty)}" if empty else ""
        own_test = self._own_test(found)
        first = read_image(paths[0], self.form)
        height, width = first.shape[1:]
        form = f"{height} x {width} pixels, {'grey' if self.form.grayscale else 'RGB'}"
        rank_zero_info(
            f"'{self.root}': {len(paths):,} images of {len(self.classes):,} classes ({form}): {shorten(self.classes)}"
            f"{nothing}{self._fate(folders, own_test)}{self._hint(paths[0])}"
        )
        dataset = self._decode(paths, labels, first)
        if own_test is None:
            return LoadedData(dataset, labels)
        return keep_own_test(dataset, labels, np.array(folders) == own_test)

    def _own_test(self, found: FoundImages) -> str | None:
        """Return the folder whose images are kept for testing, or None if all are pooled."""
        if self.test == "split":
            return None
        folder = next((name for name in reversed(SPLIT_FOLDERS[1:]) if name in found.folders), None)
        if folder is None:
            raise ConfigurationError(
                f"data.test='shared': there is no folder test or val with images in {str(self.root)!r}; give 'split'"
            )
        return folder

    def _fate(self, folders: list[str], own_test: str | None) -> str:
        """Describe how the images of each split folder are used, for the line that says what was found."""
        counts = Counter(folders)
        said = ", ".join(f"{name}/ ({count:,})" for name, count in counts.items() if name != own_test)
        if own_test is not None:
            return f"; {own_test}/ ({counts[own_test]:,}) evaluates the global model, the clients get {said}"
        if len(counts) > 1:
            return (
                f"; {said} are pooled and dealt out to the clients (data.test: shared keeps {folders[-1]}/ for testing)"
            )
        return ""

    def _hint(self, path: Path) -> str:
        """Say how grey images are read as such, if one is grey and is not."""
        if self.form.grayscale or not is_grey(path):
            return ""
        return "; the first file is grey: data.grayscale: true gives one channel in place of three equal ones"

    def _decode(self, paths: list[Path], labels: np.ndarray, first: np.ndarray) -> Dataset:
        augment = as_augment(self.augment, RandomCrop(max(first.shape[-1] // 8, 1)))
        check_transforms(torch.from_numpy(first)[None], self.transform, augment)
        if not self._fit(paths):
            files = ImageFiles(paths, labels, self.form)
            return BatchTransformDataset(files, self.transform, augment)
        images = self._decoded(paths, (len(paths), *first.shape))
        tensors = (torch.from_numpy(images), torch.from_numpy(labels))
        return ArrayDataset(tensors, transform=self.transform, augment=augment)

    def _decoded(self, paths: list[Path], shape: tuple[int, ...]) -> np.ndarray:
        """Return the images, uint8 ``(M, C, H, W)``, from the disk if they were decoded before."""
        folder = Path(self.cache).expanduser() if isinstance(self.cache, str) else None
        cache = ImageCache(paths, self.form, folder) if self.cache else None
        kept = cache.read(shape) if cache is not None else None
        if kept is not None:
            return kept
        images = np.empty(shape, dtype=np.uint8)
        decode_images(paths, self.form, self.num_threads, images)
        if cache is not None:
            cache.write(images)
        return images

    def _fit(self, paths: list[Path]) -> bool:
        return len(paths) * read_image(paths[0], self.form).nbytes <= self.max_memory_gib * 2**30


class FoundImages(NamedTuple):
    """The images of a tree.

    Attributes:
        paths: Paths of the image files, ordered by split, class and name.
        labels: Class of each image, int64 ``(M,)``.
        classes: Sorted names of the classes.
        empty: Sorted names of the folders without images, which are no classes.
        folders: Split folder of each image, ``train``, ``test``, ...; an empty string if there are no such folders.
    """

    paths: list[Path]
    labels: np.ndarray
    classes: list[str]
    empty: list[str]
    folders: list[str]


def find_images(root: Path) -> FoundImages:
    """Find the image files of a tree with a folder for each class.

    Args:
        root: Folder with ``root/<class>/...`` or ``root/{train,val,test}/<class>/...``.

    Raises:
        ConfigurationError: The folder is missing, has no images in folders of classes, or has only one class.
    """
    if not root.is_dir():
        nothing = "it is a file, not a folder" if root.is_file() else "no such folder"
        raise ConfigurationError(f"data.root={str(root)!r}: {nothing}; {LAYOUT}")
    splits = [root / name for name in SPLIT_FOLDERS if (root / name).is_dir()] if (root / "train").is_dir() else [root]
    folders = [folder for split in splits for folder in sorted(split.iterdir()) if folder.is_dir()]
    found = [(path, folder) for folder in folders for path in _images_under(folder)]
    classes = sorted({folder.name for _, folder in found})
    if not found:
        raise ConfigurationError(f"data.root={str(root)!r}: no images in folders of classes; {LAYOUT}")
    if len(classes) == 1:
        raise ConfigurationError(f"data.root={str(root)!r}: found one class only, {classes[0]!r}; {LAYOUT}")
    number = {name: position for position, name in enumerate(classes)}
    labels = np.array([number[folder.name] for _, folder in found], dtype=np.int64)
    empty = sorted({folder.name for folder in folders} - set(classes))
    of_each = [folder.parent.name if folder.parent != root else "" for _, folder in found]
    return FoundImages([path for path, _ in found], labels, classes, empty, of_each)


def _check_channels(mean: tuple[float, ...], std: tuple[float, ...], num_channels: int) -> None:
    for name, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, num_channels):
            raise ConfigurationError(
                f"data.{name}={values}: the images have {num_channels} channel{'s' if num_channels > 1 else ''}; give "
                f"{'one value or three' if num_channels > 1 else 'one value, e.g. [0.5]'}"
            )
    if not all(value > 0 for value in std):
        raise ConfigurationError(f"data.std={std}: give values above 0")


def _images_under(folder: Path) -> list[Path]:
    names = (os.path.join(where, name) for where, _, files in os.walk(folder) for name in files)
    return [Path(name) for name in sorted(names) if os.path.splitext(name)[1].lower() in SUFFIXES]
