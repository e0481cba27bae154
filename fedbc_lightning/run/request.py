"""What the user asks of a verb of the trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.run.run import Run


class Request(NamedTuple):
    """One call of a verb of the trainer.

    Attributes:
        fn: The verb.
        model: The user's module.
        datamodule: The data.
        algorithm: The method.
        ckpt_path: Checkpoint from which the run is restored, ``last``, or None.
        task: Function that does the work with the run that was set up, and returns the result of the verb.
        takes_other_seed: Whether the run may resume with another seed than that of its checkpoint.
    """

    fn: TrainerFn
    model: LightningModule
    datamodule: FederatedDataModule
    algorithm: FederatedAlgorithm
    ckpt_path: str | os.PathLike | None
    task: Callable[[Run], Any]
    takes_other_seed: bool = False
