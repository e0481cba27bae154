"""Reading image files: as RGB or grey, scaled and cropped, in threads or one by one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import Dataset

from fedbc_lightning.core.errors import ConfigurationError

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

GREY_MODES = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N")
"""Modes of Pillow for images that have no colours."""


class ImageForm(NamedTuple):
    """The form in which images are read.

    Attributes:
        image_size: Height and width to which images are scaled and centrally cropped; None does not scale.
        grayscale: Whether images have one channel, the brightness, in place of RGB's three.
    """

    image_size: int | None = None
    grayscale: bool = False

    @property
    def num_channels(self) -> int:
        """Number of channels of an image."""
        return 1 if self.grayscale else 3


class ImageFiles(Dataset):
    """Data set of images that are decoded when they are needed, with items ``(uint8 (C, H, W), class)``.

    Args:
        paths: Paths of the images.
        targets: Class of each image, ``(M,)``.
        form: Form in which they are read.
    """

    def __init__(self, paths: list[Path], targets: np.ndarray, form: ImageForm) -> None:
        self.paths = paths
        self.targets = targets
        self.form = form
        self.shape = read_image(paths[0], form).shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = read_image(self.paths[index], self.form)
        if image.shape != self.shape:
            _refuse_size(self.paths[index], image.shape, self.shape)
        return torch.from_numpy(image), int(self.targets[index])


def read_image(path: Path, form: ImageForm) -> np.ndarray:
    """Read an image, uint8 ``(C, H, W)`` with the 3 channels of RGB or 1 of grey.

    Raises:
        ConfigurationError: The file is not a readable image, or its pixels are 32-bit integers or floats.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = _converted(file, "L" if form.grayscale else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigurationError(
            f"data.root: cannot read the image {str(path)!r} ({error}); mend or delete it"
        ) from error
    size = form.image_size
    if size is not None and image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    # A copy in any case: the pixels of Pillow's image cannot be written, and torch warns of tensors on such memory.
    return np.array(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), order="C")


def is_grey(path: Path) -> bool:
    """Return whether the header of a readable image says that it has no colours."""
    from PIL import Image

    with Image.open(path) as file:
        return file.mode in GREY_MODES


def _converted(file: PILImage, mode: str) -> PILImage:
    """Convert an opened image to a mode of 8 bits; PIL's ``convert`` alone would clip 16-bit values at 255."""
    from PIL import Image

    if file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PPM"):  # 16 bits of grey
        file = Image.fromarray(np.rint(np.asarray(file) / 257).astype(np.uint8))
    elif file.mode in ("I", "F"):
        kind = "32-bit integers" if file.mode == "I" else "floats"
        raise ValueError(f"its pixels are {kind}, so it is unknown which value is white: save it with 8 or 16 bits")
    return file.convert(mode)


def decode_images(
    paths: list[Path], form: ImageForm, num_threads: int | None = None, images: np.ndarray | None = None
) -> None:
    """Decode all images in threads; a progress bar is shown on a terminal.

    Args:
        paths: Paths of the images.
        form: Form in which they are read.
        num_threads: Number of threads; None is one per CPU core.
        images: Array that receives the images, uint8 ``(M, C, H, W)``; with None they are only checked.

    Raises:
        ConfigurationError: A file cannot be read, or sizes differ.
    """
    shape = read_image(paths[0], form).shape

    def decode(start: int) -> None:
        for position in range(start, min(start + 256, len(paths))):
            image = read_image(paths[position], form)
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


def _refuse_size(path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> NoReturn:
    raise ConfigurationError(
        f"data.image_size: {str(path)!r} has {shape[1]} x {shape[2]} pixels, the first image "
        f"{expected[1]} x {expected[2]}; give image_size to scale all images"
    )
