"""Reading of IDX files, in which MNIST and similar data sets come: a short header, then bytes."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError


def find_idx(path: Path) -> Path | None:
    """Return ``path``, or the same path with ``.gz`` appended, whichever exists; None if neither does."""
    return next((found for found in (path, path.with_name(path.name + ".gz")) if found.is_file()), None)


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """Return the uint8 array in an IDX file, mapped from the disk or unpacked from a ``.gz``; it is read-only.

    Args:
        path: Path of the file.
        num_axes: Number of axes, 3 for images ``(n, H, W)`` and 1 for labels ``(n,)``.

    Raises:
        ConfigurationError: The file is damaged.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                content = np.frombuffer(file.read(), np.uint8)
        else:
            content = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"cannot be read ({error})") from error
    start = 4 * (1 + num_axes)
    if bytes(content[:4]) != bytes([0, 0, 8, num_axes]) or len(content) < start:
        raise damaged(path, f"is no IDX file of {'images' if num_axes > 1 else 'labels'}")
    shape = np.frombuffer(bytes(content[4:start]), ">u4").tolist()
    if len(content) != start + math.prod(shape):
        size = f"{start + math.prod(shape):,} bytes"
        raise damaged(path, f"should have {size} by its header, but has {len(content):,}")
    return content[start:].reshape(shape)


def read_labelled_images(images: Path, labels: Path, image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Read uint8 images ``(n, H, W)`` and their labels ``(n,)`` from two IDX files.

    Args:
        images: Path of the file of images.
        labels: Path of the file of labels.
        image_size: Height and width that images must have.

    Raises:
        ConfigurationError: A file is damaged, or the files do not belong together.
    """
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if pixels.shape[1:] != (image_size, image_size):
        size = f"{pixels.shape[1]} x {pixels.shape[2]} pixels instead of {image_size} x {image_size}"
        raise damaged(images, f"has images of {size}")
    if len(pixels) != len(numbers):
        raise damaged(labels, f"has {len(numbers):,} labels for the {len(pixels):,} images of {images.name}")
    return pixels, numbers


def damaged(path: Path, what: str) -> ConfigurationError:
    """Return the error that names a damaged file, what is wrong with it and what to do."""
    return ConfigurationError(f"data.root: the file {str(path)!r} {what}; delete it and download it again")
