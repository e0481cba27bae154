"""torch's deterministic algorithms, without which a GPU may give other digits each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from fedbc_lightning.core.errors import ConfigurationError, first_line

Asked = bool | Literal["warn"] | None
"""``trainer.deterministic``."""


def prepare(asked: Asked) -> None:
    """What cuBLAS must find before its first product."""
    if asked:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic_algorithms(asked: Asked) -> Iterator[None]:
    """Use them inside; torch is set as before afterwards.

    Args:
        asked: True: an operation that has none is an error; ``"warn"``: a warning; None: only cuDNN's; False: torch
            stays as it is set.

    Raises:
        ConfigurationError: An operation inside has none, and True was asked for.
    """
    if asked is False:
        yield
        return
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    is_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        cudnn.deterministic, cudnn.benchmark = True, False  # a benchmark may choose another algorithm in another run
        if asked is not None:
            torch.use_deterministic_algorithms(True, warn_only=asked == "warn")
        yield
    except RuntimeError as error:
        if asked is not True or "torch.use_deterministic_algorithms(True)" not in str(error):
            raise
        said = first_line(error).partition(", but you set")[0]
        how = "replace the operation, or use warn, which lets it pass"
        if "CUBLAS_WORKSPACE_CONFIG" in said:  # it has another value, or cuBLAS was used before there was a trainer
            said, how = "cuBLAS is not set up for it", "set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts"
        raise ConfigurationError(f"trainer.deterministic: {said}; {how}.") from error
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark = flags
