"""One run: what the user asks of it, what its set-up makes, how far it has come and the numbers that it has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.files import AnyPath
from fedbc_lightning.core.storable import plain_values
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.evaluation.summary import Evaluation
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.hook_writes import AroundEvaluation
from fedbc_lightning.run.identity import Identity
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.state.declaration import ClientStore, ServerState


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
        identity: What makes the run this one.
        user: The user's module.
        datamodule: The data of the clients.
        hooks: The hooks of callbacks and of the user's module.
        shim: What the user's module sees as ``self.trainer``.
        around_evaluation: What hooks around an evaluation write into the module.
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
    identity: Identity

    def __post_init__(self) -> None:
        """Show the parts of the federation that belong to the user."""
        self.user, self.datamodule = self.federation.user, self.federation.datamodule
        self.hooks, self.shim = self.user.hooks, self.user.shim
        groups = enumerate(self.federation.bench.optimizer.configured.groups)
        made = {f"configure_optimizers.{k}.{name}": v for k, group in groups for name, v in group.items()}
        # How torch computes a step (foreach, fused) depends on the device.
        made = {name: v for name, v in made.items() if not (v is None or isinstance(v, bool))}
        self._made = plain_values(made)
        self.around_evaluation = AroundEvaluation(self.federation, is_fit=self.fn == TrainerFn.FITTING)

    @property
    def settings_used(self) -> dict[str, Any]:
        """The hyper-parameters by dotted names, with the engine that ``auto`` has chosen, which a resumed run keeps."""
        return self.identity.settings | {"trainer.engine": self.federation.engine_kind}

    @property
    def compared(self) -> dict[str, Any]:
        """What a resumed run compares: the hyper-parameters, and the options of the optimizer that the module made."""
        return self.settings_used | self._made

    def has_split(self, split: str) -> bool:
        """Return whether there is data of the split, of any client or shared by all."""
        return bool(self.datamodule.num_samples(split).any()) or self.datamodule.pooled_dataset(split) is not None

    @property
    def splits(self) -> list[str]:
        """Splits on which rounds are evaluated, of those that there are."""
        splits = ["test", "val"] if self.settings.eval_test else ["val"]
        return [split for split in splits if self.has_split(split)]

    def evaluate(self, splits: list[str], round: int) -> Evaluation:
        """Evaluate the staged models on splits that exist; the module holds z again afterwards."""
        if self.evaluator.finetune_steps:
            self.federation.start_local_steps(round)
        with self.around_evaluation.models() as models:
            evaluation = self.evaluator.run(splits, models, round)
        self.federation.load_global()
        return evaluation

    def tear_down(self) -> None:
        """Call the hooks ``teardown``, in Lightning's order, and give the module back to the user."""
        try:
            self.datamodule.teardown(self.fn.value)
            self.hooks.call("teardown", self.fn.value)
        finally:
            self.user.detach()


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
        is_strict: Whether a run is refused that differs from its checkpoint in settings, code, data or versions.
    """

    fn: TrainerFn
    model: LightningModule
    datamodule: FederatedDataModule
    algorithm: FederatedAlgorithm
    ckpt_path: AnyPath | None
    task: Callable[[Run], Any]
    takes_other_seed: bool = False
    is_strict: bool = False


@dataclass
class Progress:
    """What changes while a run goes on; users and callbacks read it as attributes of the trainer.

    Attributes:
        current_round: Number of the round that is under way.
        finished_round: Number of the last round that was committed.
        should_stop: Whether the run ends after the current round; callbacks and the module may set it.
        callback_metrics: The last value of each metric by its name.
        evaluation: The last evaluation.
        log_dir: The run folder; None before a run has one.
        loggers: Lightning's loggers of the run.
        num_rows: Number of rows of each table in the checkpoint from which the run resumes.
    """

    current_round: int = 0
    finished_round: int = 0
    should_stop: bool = False
    callback_metrics: dict[str, Tensor] = field(default_factory=dict)
    evaluation: Evaluation = field(default_factory=Evaluation)
    log_dir: str | None = None
    loggers: list[Any] = field(default_factory=list)
    num_rows: dict[str, int] = field(default_factory=dict)

    @property
    def logger(self) -> Any:
        """First logger; None if there is none."""
        return self.loggers[0] if self.loggers else None

    def of_next_run(self) -> Progress:
        """Return the progress with which the trainer's next run begins.

        The folder, the loggers and the evaluation of this run are shown until the next one has its own.
        """
        return Progress(evaluation=self.evaluation, log_dir=self.log_dir, loggers=self.loggers)

    def is_over(self, max_rounds: int) -> bool:
        """Return whether a run of T = ``max_rounds`` has no round left."""
        return self.finished_round >= max_rounds or self.should_stop

    def restore(self, saved: Mapping[str, Any], max_rounds: int) -> None:
        """Go on from a checkpoint.

        Args:
            saved: Our part of the checkpoint.
            max_rounds: T; a run that was stopped early goes on if T is larger now.
        """
        self.current_round = self.finished_round = saved["round"]
        self.should_stop = saved["should_stop"] and max_rounds <= saved["max_rounds"]
        self.num_rows = saved.get("rows", {})
        self.callback_metrics = {name: torch.tensor(value) for name, value in saved["callback_metrics"].items()}

    def publish(self, metrics: Mapping[str, float]) -> None:
        """Show new values of metrics to callbacks."""
        self.callback_metrics = self.callback_metrics | {name: torch.tensor(value) for name, value in metrics.items()}


@dataclass
class Outcome:
    """What a run in other processes leaves to the process that called the trainer.

    Attributes:
        server: State of the server.
        clients: State of the clients.
        progress: How far the run has come, without its loggers.
        result: Value that the verb returns.
    """

    server: ServerState
    clients: ClientStore
    progress: Progress
    result: Any
