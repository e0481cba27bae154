"""One run: what the user asks of it, and everything that its set-up makes for the loop over rounds and other tasks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.evaluation.summary import Evaluation
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.hooks import Hooks
from fedbc_lightning.module.trainer_proxy import ModuleTrainer
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run_progress import Progress
from fedbc_lightning.run.settings import RunSettings

if TYPE_CHECKING:
    from lightning.fabric import Fabric


@dataclass(eq=False)
class Run:
    """Holds what a run needs; ``set_up`` makes it, and nothing is added later.

    Attributes:
        fn: The verb of the trainer for which the run was set up.
        settings: What the user chose.
        seed: Seed of everything random.
        fabric: Fabric that has been launched.
        federation: Server, clients and engine, with the user's module and data.
        evaluator: Evaluates the federation's models.
        progress: How far the run has come.
        lock: Locks the run folder.
        path: Checkpoint from which the run was restored; None if it begins anew.
        is_trained: Whether the models are those of a training run, from a checkpoint or of the same trainer.
    """

    fn: TrainerFn
    settings: RunSettings
    seed: int
    fabric: Fabric
    federation: Federation
    evaluator: Evaluator
    progress: Progress
    lock: RunLock
    path: Path | None
    is_trained: bool

    @property
    def user(self) -> UserModule:
        """The user's module."""
        return self.federation.user

    @property
    def datamodule(self) -> FederatedDataModule:
        """The data of the clients."""
        return self.federation.datamodule

    @property
    def hooks(self) -> Hooks:
        """The hooks of callbacks and of the user's module."""
        return self.user.hooks

    @property
    def shim(self) -> ModuleTrainer:
        """What the user's module sees as ``self.trainer``."""
        return self.user.shim

    def has_split(self, split: str) -> bool:
        """Return whether there is data of the split, of any client or shared by all."""
        return bool(self.datamodule.num_samples(split).any()) or self.datamodule.pooled_dataset(split) is not None

    def evaluate(self, splits: list[str], round: int) -> Evaluation:
        """Evaluate the staged models on splits that exist; the module holds z again afterwards."""
        if self.evaluator.fine_tuned.num_steps:
            self.federation.start_local_steps(round)
        evaluation = self.evaluator.run(splits, self.federation.models(), round)
        self.federation.load_global()
        return evaluation

    def tear_down(self) -> None:
        """Give the module back to the user, and call the hooks ``teardown``."""
        stage = self.fn.value
        self.user.detach()
        self.hooks.call("teardown", stage)
        self.datamodule.teardown(stage)


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
