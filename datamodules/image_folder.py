"""Data module for a tree of image files with one folder per class."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedbc_lightning.core.checks import check_at_least, check_choice
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import ArrayDataset, BatchTransformDataset, IndexedDataModule, LoadedData
from fedbc_lightning.partition import Partitioner, PowerLaw

from .findings import shorten
from .image_cache import ImageCache
from .own_test import OwnTest, keep_own_test
from .transforms import Normalize, RandomCrop, as_augment, as_transform, check_transforms

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test")
LAYOUT = "expected <root>/<class>/*.jpg or <root>/{train,test}/<class>/*.jpg (also png, bmp, gif, ppm, tiff, webp)"


class ImageFolderDataModule(IndexedDataModule):
    """Federates images in folders: ``root/<class>/...``, or ``root/{train,val,test}/<class>/...``.

    Every image is decoded once, to uint8 RGB in memory, and kept on the disk for the next start, see ``cache``. If the
    images do not fit into memory, each is decoded when it is needed, and once before training, to find those that
    cannot be read or differ in size. Grey images of 16 bits are scaled to 8 bits (65535 becomes 255); images of 32 bits
    or of floats are refused, because it is unknown which value is white. Inputs are float32 ``(B, 3, H, W)``, targets
    int64 ``(B,)``, the position of the class among the sorted names.

    Args:
        root: Folder of the tree.
        partitioner: Partitioner that assigns images to clients; None is
            ``PowerLaw(20, classes_per_client=2, exponent=1.2)``.
        image_size: Height and width in pixels to which images are scaled and centrally cropped; with None they are not
            scaled, and must all have the same size.
        augment: Augmentation of training batches: True moves each image by up to an eighth of its width in each
            direction (4 pixels of 32), False changes none, and any augmentation of
            :class:`~fedbc_lightning.datamodules.CIFAR10DataModule` may be given.
        transform: Transform of every batch, see :class:`~fedbc_lightning.datamodules.CIFAR10DataModule`; None
            normalises by ``mean`` and ``std``.
        mean: Mean of each channel, for pixels in [0, 1], which is subtracted.
        std: Standard deviation of each channel, for pixels in [0, 1], by which pixels are divided.
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
        augment: bool | nn.Module = False,
        transform: nn.Module | None = None,
        mean: tuple[float, float, float] = (0.5, 0.5, 0.5),
        std: tuple[float, float, float] = (0.5, 0.5, 0.5),
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
        if not all(value > 0 for value in std):
            raise ConfigurationError(f"data.std={std}: give values above 0")
        self.test = test
        if test == "shared":
            self.test_fraction = None
        self.root = Path(root).expanduser()
        self.image_size, self.augment = image_size, augment
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
            decode_images(paths, self.image_size, self.num_threads)

    def load(self) -> LoadedData:
        """Return the images and their classes, in the order of their paths."""
        found = find_images(self.root)
        paths, labels, self.classes, empty, folders = found
        nothing = f"; no images in: {shorten(empty)}" if empty else ""
        own_test = self._own_test(found)
        rank_zero_info(
            f"'{self.root}': {len(paths):,} images of {len(self.classes):,} classes: {shorten(self.classes)}{nothing}"
            f"{self._fate(folders, own_test)}"
        )
        dataset = self._decode(paths, labels)
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

    def _decode(self, paths: list[Path], labels: np.ndarray) -> Dataset:
        first = read_image(paths[0], self.image_size)
        augment = as_augment(self.augment, RandomCrop(max(first.shape[-1] // 8, 1)))
        check_transforms(torch.from_numpy(first)[None], self.transform, augment)
        if not self._fit(paths):
            files = ImageFiles(paths, labels, self.image_size)
            return BatchTransformDataset(files, self.transform, augment)
        images = self._decoded(paths, (len(paths), *first.shape))
        tensors = (torch.from_numpy(images), torch.from_numpy(labels))
        return ArrayDataset(tensors, transform=self.transform, augment=augment)

    def _decoded(self, paths: list[Path], shape: tuple[int, ...]) -> np.ndarray:
        """Return the images, uint8 ``(M, 3, H, W)``, from the disk if they were decoded before."""
        folder = Path(self.cache).expanduser() if isinstance(self.cache, str) else None
        cache = ImageCache(paths, self.image_size, folder) if self.cache else None
        kept = cache.read(shape) if cache is not None else None
        if kept is not None:
            return kept
        images = np.empty(shape, dtype=np.uint8)
        decode_images(paths, self.image_size, self.num_threads, images)
        if cache is not None:
            cache.write(images)
        return images

    def _fit(self, paths: list[Path]) -> bool:
        return len(paths) * read_image(paths[0], self.image_size).nbytes <= self.max_memory_gib * 2**30


class ImageFiles(Dataset):
    """Data set of images that are decoded when they are needed, with items ``(uint8 (3, H, W), class)``.

    Args:
        paths: Paths of the images.
        targets: Class of each image, ``(M,)``.
        image_size: Height and width to which images are scaled and cropped; None does not scale.
    """

    def __init__(self, paths: list[Path], targets: np.ndarray, image_size: int | None) -> None:
        self.paths = paths
        self.targets = targets
        self.image_size = image_size
        self.shape = read_image(paths[0], image_size).shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = read_image(self.paths[index], self.image_size)
        if image.shape != self.shape:
            _refuse_size(self.paths[index], image.shape, self.shape)
        return torch.from_numpy(image), int(self.targets[index])


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


def read_image(path: Path, image_size: int | None = None) -> np.ndarray:
    """Read an image as RGB, uint8 ``(3, H, W)``, scaled and centrally cropped to a square if ``image_size`` is given.

    Raises:
        ConfigurationError: The file is not a readable image, or its pixels are 32-bit integers or floats.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = _to_rgb(file)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigurationError(
            f"data.root: cannot read the image {str(path)!r} ({error}); mend or delete it"
        ) from error
    if image_size is not None and image.size != (image_size, image_size):
        image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _to_rgb(file: PILImage) -> PILImage:
    """Convert an opened image to RGB; PIL's ``convert`` alone would clip 16-bit values at 255."""
    from PIL import Image

    if file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PPM"):  # 16 bits of grey
        file = Image.fromarray(np.rint(np.asarray(file) / 257).astype(np.uint8))
    elif file.mode in ("I", "F"):
        kind = "32-bit integers" if file.mode == "I" else "floats"
        raise ValueError(f"its pixels are {kind}, so it is unknown which value is white: save it with 8 or 16 bits")
    return file.convert("RGB")


def decode_images(
    paths: list[Path], image_size: int | None = None, num_threads: int | None = None, images: np.ndarray | None = None
) -> None:
    """Decode all images in threads; a progress bar is shown on a terminal.

    Args:
        paths: Paths of the images.
        image_size: Height and width to which images are scaled and cropped; None does not scale.
        num_threads: Number of threads; None is one per CPU core.
        images: Array that receives the images, uint8 ``(M, 3, H, W)``; with None they are only checked.

    Raises:
        ConfigurationError: A file cannot be read, or sizes differ.
    """
    shape = read_image(paths[0], image_size).shape

    def decode(start: int) -> None:
        for position in range(start, min(start + 256, len(paths))):
            image = read_image(paths[position], image_size)
            if image.shape != shape:
                _refuse_size(paths[position], image.shape, shape)
            if images is not None:
                images[position] = image

    console = Console(stderr=True)
    starts = range(0, len(paths), 256)
    with ThreadPoolExecutor(num_threads or os.cpu_count()) as threads:
        work = [threads.submit(decode, start) for start in starts]
        description = f"decoding {len(paths):,} images"
        try:
            for job in track(work, description, console=console, disable=not console.is_terminal, transient=True):
                job.result()
        except BaseException:  # a bad file, or Ctrl-C: do not decode the rest first
            threads.shutdown(cancel_futures=True)
            raise


def _images_under(folder: Path) -> list[Path]:
    names = (os.path.join(where, name) for where, _, files in os.walk(folder) for name in files)
    return [Path(name) for name in sorted(names) if os.path.splitext(name)[1].lower() in SUFFIXES]


def _refuse_size(path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> NoReturn:
    raise ConfigurationError(
        f"data.image_size: {str(path)!r} has {shape[1]} x {shape[2]} pixels, the first image "
        f"{expected[1]} x {expected[2]}; give image_size to scale all images"
    )
