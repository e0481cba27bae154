"""Keeps decoded images on the disk, so that the next start need not decode them again."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import PIL
import platformdirs
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import first_line

from .image_files import ImageForm

FORM = "uint8 (M, {channels}, H, W), 1"
"""What a file holds, and the version of :func:`~fedbc_lightning.datamodules.image_files.read_image` that made it."""
MAX_BYTES = 8 * 2**30
"""Most bytes of all files together; the ones that were not used for the longest time are deleted."""
SECONDS_OF_A_TEMPORARY_FILE = 24 * 3600.0
"""A temporary file that is older was left by a process that was killed."""


class ImageCache:
    """The decoded images of one folder, in a file that is named after a hash of what they were decoded from.

    The hash is over the paths, sizes and times (of the content and of the entry in the folder) of all images, the size
    to which they are scaled, and the version of Pillow. A file is written under another name and renamed, so that a
    reader finds a whole file or none, whatever other processes do; its content has checksums.

    Args:
        paths: Paths of the images.
        form: Form in which the images are read.
        folder: Folder of the files; None is the user's cache folder.
    """

    def __init__(self, paths: list[Path], form: ImageForm, folder: Path | None = None) -> None:
        self._paths, self._form = paths, form
        self.folder = platformdirs.user_cache_path("fedbc_lightning") / "images" if folder is None else folder
        self._key = self._hash()
        self._path = self.folder / f"{self._key}.npz"

    def read(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return the images, or None if they are not kept; a file that cannot be read is made again.

        Args:
            shape: Their shape, (M, C, H, W).
        """
        if not self._path.is_file():
            return None
        try:
            with self._path.open("rb") as file, np.load(file, allow_pickle=False) as content:
                images, key = content["images"], str(content["key"])
            if (key, images.shape, images.dtype) != (self._key, shape, np.uint8):
                raise ValueError("it holds something else")
        except Exception as error:  # of any class: a damaged file may hold anything
            rank_zero_info(
                f"'{self._path}' does not hold the decoded images ({first_line(error)}); they are decoded again."
            )
            return None
        with suppress(OSError):  # the folder may be another user's
            os.utime(self._path)
        return images

    def write(self, images: np.ndarray) -> None:
        """Keep the images, unless a file has changed since they were decoded, or the disk refuses them."""
        if images.nbytes > MAX_BYTES or self._hash() != self._key:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(images.nbytes)
            self._write(images)
        except OSError as error:
            rank_zero_info(
                f"Decoded images cannot be kept in '{self.folder}' ({first_line(error)}); the next start decodes again."
            )
            return
        rank_zero_info(
            f"The decoded images are kept in '{self._path}' ({images.nbytes / 2**20:,.0f} MiB) for the next start; "
            "data.cache: false keeps none."
        )

    def _write(self, images: np.ndarray) -> None:
        descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez(file, images=images, key=np.array(self._key))
            os.replace(name, self._path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Delete the files that were not used for the longest time, and what killed processes left."""
        kept = []
        for path in self.folder.iterdir():
            with suppress(OSError):  # another process has deleted it
                stat = path.stat()
                if path.suffix == ".npz":
                    kept.append((stat.st_mtime, stat.st_size, path))
                elif path.suffix == ".tmp" and stat.st_mtime < time.time() - SECONDS_OF_A_TEMPORARY_FILE:
                    path.unlink()
        total = num_bytes + sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= MAX_BYTES:
                break
            with suppress(OSError):
                path.unlink()
                total -= size

    def _hash(self) -> str:
        kind = FORM.format(channels=self._form.num_channels)
        digest = hashlib.sha256(f"{kind}\0{PIL.__version__}\0{self._form.image_size}\0".encode())
        for path in self._paths:
            try:
                stat = path.stat()
            except OSError:  # decoding will say so
                digest.update(os.fsencode(path) + b"\0gone\0")
                continue
            times = f"\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\0"
            digest.update(os.fsencode(os.path.abspath(path)) + times.encode())
        return digest.hexdigest()[:32]
