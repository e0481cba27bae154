"""Lists the names of ``lightning.Trainer`` that a module may use in federated training, and replacements of others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.core.lightning_names import both

if TYPE_CHECKING:
    from lightning.fabric import Fabric

FIXED: dict[str, Any] = {
    "limit_train_batches": 1.0, "limit_val_batches": 1.0, "limit_test_batches": 1.0, "limit_predict_batches": 1.0,
    "overfit_batches": 0.0, "log_every_n_steps": 50, "check_val_every_n_epoch": 1, "val_check_interval": 1.0,
    "val_check_batch": None, "num_sanity_val_steps": 0, "num_sanity_val_batches": [], "min_epochs": None,
    "min_steps": None, "checkpoint_callback": None, "checkpoint_callbacks": [], "ckpt_path": None,
    "distributed_sampler_kwargs": None, "enable_validation": True, "interrupted": False, "received_sigterm": False,
    "enable_autolog_hparams": True, "node_rank": 0, "scaler": None,
    "profiler": PassThroughProfiler(), "print": rank_zero_only(print),
}  # fmt: skip
"""Constant answers: Lightning's defaults of settings of its Trainer that have no counterpart here."""

INSTEAD: dict[str, str] = {
    "accelerator": "self.device is where the module computes",
    "device_ids": "self.device is where the module computes",
    "fit": "the run itself is started outside, by fedbc_lightning.FederatedTrainer.fit",
    "fit_loop": "self.trainer.current_epoch, global_step, max_epochs and num_training_batches tell where a client is",
    "init_module": "the module is made before the run",
    "optimizer_frequencies": "there is one optimizer, self.optimizers()",
    "precision_plugin": "self.trainer.precision tells the precision; clip by self.clip_gradients",
    "predict": "FederatedTrainer.predict runs predict_step",
    "predict_loop": "FederatedTrainer.predict runs predict_step",
    "save_checkpoint": "checkpoints/last.ckpt is written by itself; keep others by callbacks.RoundCheckpoint",
    "test": "test data are evaluated after rounds (trainer.eval_every_n_rounds), or by FederatedTrainer.test",
    "test_loop": "test data are evaluated after rounds (trainer.eval_every_n_rounds), or by FederatedTrainer.test",
    "tuner": "tune by a study, fedbc-cli compare",
    "validate": "validation data are evaluated after rounds (trainer.eval_every_n_rounds)",
    "validate_loop": "validation data are evaluated after rounds (trainer.eval_every_n_rounds)",
}
"""Names without a meaning inside a client, with what to use instead."""


class AskedTrainer(Protocol):
    """The object that the module sees as ``self.trainer``, from whose attributes other answers are computed."""

    def __getattr__(self, name: str) -> Any:
        """Return the value of a name."""


Compute = Callable[[AskedTrainer, dict[str, Any]], Any]


class ModuleStrategy:
    """Stands for ``self.trainer.strategy`` with one process, because each process trains clients of its own.

    Args:
        trainer: The module's trainer, which knows whether a client trains or a model is evaluated.

    Attributes:
        fabric: Connects the processes in hooks that all of them call; None before they are started.
    """

    world_size = 1
    global_rank = local_rank = node_rank = 0

    def __init__(self, trainer: AskedTrainer) -> None:
        self._trainer = trainer
        self._lightning_optimizers: list[Any] = []
        self.fabric: Fabric | None = None

    @property
    def root_device(self) -> torch.device:
        """The device on which the module computes."""
        return torch.device("cpu") if self.fabric is None else self.fabric.device

    @property
    def model(self) -> Any:
        """The user's module, without a wrapper."""
        return self._trainer.lightning_module

    @property
    def lightning_module(self) -> Any:
        """The user's module."""
        return self._trainer.lightning_module

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes in ``setup`` and in the hooks of the run and of rounds, but not inside a client."""
        if self.fabric is not None and not _is_alone(self._trainer):
            self.fabric.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process ``src`` in hooks where :meth:`barrier` waits, and ``obj`` itself elsewhere."""
        return obj if self.fabric is None or _is_alone(self._trainer) else self.fabric.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensor itself, as on one device in Lightning: no other process has the same client."""
        return tensor

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor itself, as on one device in Lightning."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the decision itself, as on one device in Lightning."""
        return decision


def _is_alone(trainer: AskedTrainer) -> bool:
    """Return whether each process is busy with clients of its own, so that none may wait for another."""
    values = trainer.__dict__["_values"]
    return any(values[name] for name in ("training", "validating", "testing", "predicting"))


def _stage(values: dict[str, Any]) -> RunningStage | None:
    stages = (
        ("validating", RunningStage.VALIDATING), ("testing", RunningStage.TESTING),
        ("predicting", RunningStage.PREDICTING), ("training", RunningStage.TRAINING),
    )  # fmt: skip
    return next((stage for name, stage in stages if values[name]), None)


def _state(trainer: AskedTrainer, values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        fn=values.get("fn", TrainerFn.FITTING), status=TrainerStatus.RUNNING, stage=_stage(values),
        finished=False, stopped=False,
    )  # fmt: skip


def _train_dataloader(trainer: AskedTrainer, values: dict[str, Any]) -> Any:
    return None if values["current_client"] is None else values["train_dataloader"]


def _is_last_batch(trainer: AskedTrainer, values: dict[str, Any]) -> bool:
    if values["current_client"] is None or trainer.collector is None:
        return False
    return trainer.collector().num_batches == values["num_training_batches"]


def _progress_bar_metrics(trainer: AskedTrainer, values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values["callback_metrics"].items()}


def _should_stop(trainer: AskedTrainer, values: dict[str, Any]) -> bool:
    return trainer.is_client_stopped if values["training"] else trainer.run.should_stop


def _early_stopping_callbacks(trainer: AskedTrainer, values: dict[str, Any]) -> list[Any]:
    return [callback for callback in values["callbacks"] if isinstance(callback, both(EarlyStopping))]


def _count(name: str) -> Compute:
    def count(trainer: AskedTrainer, values: dict[str, Any]) -> list[int]:
        return [] if values[name] is None else [len(values[name])]

    return count


DERIVED: dict[str, tuple[tuple[str, ...], Compute]] = {
    "model": ((), lambda trainer, values: trainer.lightning_module),
    "state": ((), _state),
    "evaluating": ((), lambda trainer, values: bool(values["validating"] or values["testing"])),
    "train_dataloader": (("current_client",), _train_dataloader),
    "is_last_batch": (("current_client", "global_step"), _is_last_batch),
    "should_stop": (("global_step",), _should_stop),
    "logged_metrics": (("callback_metrics",), lambda trainer, values: values["callback_metrics"]),
    "progress_bar_metrics": (("callback_metrics",), _progress_bar_metrics),
    "early_stopping_callback": ((), lambda trainer, values: next(iter(trainer.early_stopping_callbacks), None)),
    "early_stopping_callbacks": ((), _early_stopping_callbacks),
    "num_val_batches": (("current_client",), _count("val_dataloaders")),
    "num_test_batches": (("current_client",), _count("test_dataloaders")),
    "num_predict_batches": (("current_client",), _count("predict_dataloaders")),
}
"""Map from names that are computed when they are read to the names they are computed from, and the function."""
