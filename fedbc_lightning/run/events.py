"""Writes what TensorBoard shows of a run beside its curves: settings, config, partition, histograms over clients."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.fabric.loggers import TensorBoardLogger
from torch import Tensor

from fedbc_lightning.data import FederatedDataModule

BY_CLIENT = "values_by_client"
"""Group of the histograms: TensorBoard sorts groups by name, and shows this one behind those of the curves."""


def draw_partition(logger: TensorBoardLogger, datamodule: FederatedDataModule) -> None:
    """Show the picture of who holds which data."""
    from PIL import Image

    from fedbc_lightning.data.partition_report import partition_png

    with Image.open(io.BytesIO(partition_png(datamodule))) as picture:
        logger.experiment.add_image("partition", np.asarray(picture.convert("RGB")), 0, dataformats="HWC")


def describe_settings(logger: TensorBoardLogger, folder: Path, settings: Mapping[str, Any]) -> None:
    """Show a run in the tabs HPARAMS and TEXT: its settings, and ``config.yaml`` as the command line has written it.

    Args:
        logger: Where to write.
        folder: Run folder.
        settings: Settings of the run under dotted names, which stand for the config of a run from Python.
    """
    from torch.utils.tensorboard.summary import hparams

    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.is_file() else yaml.safe_dump(dict(settings), sort_keys=False)
    logger.experiment.add_text("config", f"```yaml\n{text}\n```", 0)
    given = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in settings.items()}
    # Without the first summary, of a whole experiment: TensorBoard reads only one of these for all runs that it shows,
    # and would leave out the settings of other methods.
    for summary in hparams(given, {})[1:]:
        logger.experiment.file_writer.add_summary(summary)


def write_histograms(logger: TensorBoardLogger, round: int, values: Mapping[str, Tensor | Iterable[float]]) -> None:
    """Write the values of all clients by name."""
    for name, of_clients in values.items():
        tensor = of_clients if isinstance(of_clients, Tensor) else torch.tensor([*of_clients])
        with suppress(ValueError):  # NumPy cannot bin e.g. NaN, which must not end the run
            logger.experiment.add_histogram(f"{BY_CLIENT}/{name}", tensor, round)
