"""Switch on torch's deterministic algorithms; without them a GPU may give slightly different results in each run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from fedbc_lightning.core.errors import ConfigurationError, first_line

# Type of the setting `trainer.deterministic`
Asked = bool | Literal["warn"] | None


def prepare(asked: Asked) -> None:
    """Set the environment variable that cuBLAS reads before its first matrix product, if determinism is asked for."""
    if asked:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic_algorithms(asked: Asked) -> Iterator[None]:
    """Use deterministic algorithms inside the context, and restore torch's settings on leaving it.

    Args:
        asked: Value of ``trainer.deterministic``. With True, an operation without a deterministic algorithm is an
            error; with ``"warn"`` it causes a warning. None makes only cuDNN deterministic, False changes nothing.

    Raises:
        ConfigurationError: ``asked`` is True, and an operation inside has no deterministic algorithm.
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
