"""Reading image files: as RGB or grey, scaled and cropped, in threads or one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.printing import shown_progress

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

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
