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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedbc_lightning.core.checks import Count, NotNegative
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import told
from fedbc_lightning.core.printing import shown_progress
from fedbc_lightning.core.text import shorten
from fedbc_lightning.core.units import bytes_said
from fedbc_lightning.data import ArrayDataset, IndexedDataModule, LoadedData
from fedbc_lightning.data.datasets import SPLIT_NAMES, natural_clients
from fedbc_lightning.partition import Natural, Partitioner, PowerLaw

from .image_tree import LAYOUT, Role, find_images
from .own_rows import by_value
from .transforms import Normalize, RandomCrop, WholeBatch, as_augment, check_transforms
from .vision import OwnTest

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

FILES_AT_ONCE = 256  # per thread; of single files, starting the thread's work would cost as much as decoding them


class ImageFolderDataModule(IndexedDataModule):
    """Federates images in folders: ``root/<class>/...``, or ``root/{train,val,test}/<class>/...``, or as announced.

    Every image is decoded once at the start, to uint8 in memory, or in a temporary file if they do not fit. Grey images
    of 16 bits are scaled to 8 bits (65535 becomes 255); images of 32 bits or of floats are refused, because it is
    unknown which value is white. Inputs are float32 ``(B, 3, H, W)``, or ``(B, 1, H, W)`` with ``grayscale``; targets
    are int64 ``(B,)``, the position of the class among the sorted names.

    Args:
        root: Folder of the tree.
        partitioner: Partitioner that assigns images to clients; None is
            :class:`~fedbc_lightning.partition.Natural` if ``layout`` or ``clients`` say whose an image is, else
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
        test: Use of the splits. With ``"split"`` the images of all are pooled, and ``test_fraction`` of each client's
            images are its test data. With ``"shared"`` the images of ``test`` (or of ``val`` if there is no ``test``)
            evaluate the global model and belong to no client; clients get all others. With ``"own"`` they are the test
            data of the clients that have them, and those of ``val`` beside ``train`` and ``test`` are their validation
            data, in place of ``val_fraction``; all others train. ``test_fraction`` counts for ``"split"`` alone.
            None is ``"own"`` where images have a split and a client, else ``"split"``.
        layout: What the folders below ``root`` name, from the root on, e.g. ``[client, class]`` or ``[client, split,
            class]``; folders below these mean nothing. None is ``[class]``, or ``[split, class]`` if there is a folder
            ``train``; deeper folders are refused then.
        clients: Path of a CSV, TSV or Parquet table of the images with the columns ``file``, its path below ``root``,
            and ``client``, and perhaps ``class`` and ``split``, which folders say otherwise; it counts before
            ``layout``. Files without a row are no data.
        **kwargs: Arguments of :class:`~fedbc_lightning.data.IndexedDataModule`.

    Attributes:
        classes: Sorted names of the classes; available after ``setup``.

    Raises:
        ConfigurationError: The folder is missing or not such a tree, or splits are taken for clients; a file cannot be
            read, images differ in size, or they fit neither into memory nor into the temporary folder.
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
        test: OwnTest | Literal["own"] | None = None,
        layout: list[Role] | None = None,
        clients: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        has_clients = clients is not None or "client" in (layout or ())
        usual = Natural() if has_clients else PowerLaw(20, classes_per_client=2, exponent=1.2)
        super().__init__(partitioner or usual, **kwargs)
        num_channels = 1 if grayscale else 3
        if not {len(mean), len(std)} <= {1, num_channels} or not all(value > 0 for value in std):
            raise ConfigurationError(
                f"data.mean={mean}, data.std={std}: give one number, or one for each of the {num_channels} channels of "
                "the images, std above 0"
            )
        self.image_size, self.grayscale, self.augment = image_size, grayscale, augment
        self.test, self.layout = test, layout
        self.clients = None if clients is None else Path(clients).expanduser()
        self.root = Path(root).expanduser()
        self.transform = Normalize(mean, std) if transform is None else WholeBatch(transform)
        self.max_memory_gib = max_memory_gib
        self.classes: list[str] = []

    def load(self) -> LoadedData:
        """Return the images and their classes, in the order of their paths."""
        found = find_images(self.root, self.layout, self.clients)
        paths, splits, clients = [self.root / name for name in found["file"]], found["split"], found.get("client")
        own_test = self._own_test(splits, has_clients=clients is not None)
        if own_test:
            self.test_fraction = None
        names, labels = np.unique(found["class"], return_inverse=True)
        self.classes = names.tolist()
        if len(self.classes) < 2:
            raise ConfigurationError(f"data.root={str(self.root)!r}: images of {len(self.classes)} classes; {LAYOUT}")
        num_channels, height, width = self._read(paths[0]).shape
        counts = ", ".join(f"{name}/ ({count:,})" for name, count in Counter(splits).items() if name)
        is_shared = self.test == "shared"
        validates = own_test == "test" and not is_shared and {"train", "val"} <= {*splits}
        use = "evaluates the global model" if is_shared else "tests the clients"
        others = "val/ validates them in place of data.val_fraction" if validates else "all others train"
        fate = f"{own_test}/ {use}, {others}" if own_test else "all are pooled (data.test: split)"
        owners = sorted(set(clients or ()), key=by_value)
        kinds = f"classes of {len(owners):,} clients ({shorten(owners)})" if owners else "classes"
        rank_zero_info(
            f"'{self.root}': {len(paths):,} images of {len(self.classes):,} {kinds}, {height} x {width} pixels, "
            f"{'grey' if self.grayscale else 'RGB'}: {shorten(self.classes)}{f'; of {counts} {fate}' * bool(counts)}"
        )
        augment = as_augment(self.augment, RandomCrop(max(width // 8, 1)))
        check_transforms(torch.from_numpy(self._read(paths[0])[None]), self.transform, augment)
        tensors = torch.from_numpy(self._decode(paths, (num_channels, height, width))), torch.from_numpy(labels)
        data = LoadedData(ArrayDataset(tensors, transform=self.transform, augment=augment), labels)
        if clients is not None:
            data.clients, data.client_names = natural_clients(clients, by_value)
        if validates:
            data.is_val = np.array(splits) == "val"
        return data.with_test(np.array(splits) == own_test, is_shared=is_shared)

    def _own_test(self, splits: list[str], *, has_clients: bool) -> str | None:
        """Return the split whose images are kept for testing, or None if all are pooled."""
        # From the last name, so that test goes before val
        found = next((name for name in reversed(SPLIT_NAMES[1:]) if name in splits), None)
        if self.test == "split" or (self.test is None and not (found and has_clients)):
            return None
        if found is None:
            raise ConfigurationError(
                f"data.test={self.test!r}: there is no folder test or val with images in {str(self.root)!r}; give "
                "'split'"
            )
        return found

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


def _converted(file: PILImage, mode: str) -> PILImage:
    """Convert an opened image to a mode of 8 bits; PIL's ``convert`` alone would clip 16-bit values at 255."""
    from PIL import Image

    if file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PPM"):  # 16 bits of grey
        file = Image.fromarray(np.rint(np.asarray(file) / 257).astype(np.uint8))
    elif file.mode in ("I", "F"):
        raise ValueError(f"in Pillow's mode {file.mode} it is unknown which value is white: save it with 8 or 16 bits")
    return file.convert(mode)
