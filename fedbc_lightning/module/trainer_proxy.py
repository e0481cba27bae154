"""Stands for ``self.trainer`` of the user's module inside federated training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_names import both
from fedbc_lightning.core.private_lightning import show_optimizers

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule

    from fedbc_lightning.module.collector import MetricCollector

STAGES = ("training", "validating", "testing", "predicting")

# Lightning's defaults of settings of its Trainer that have no counterpart here, and values before the first client.
DEFAULTS: dict[str, Any] = {
    "limit_train_batches": 1.0, "limit_val_batches": 1.0, "limit_test_batches": 1.0, "limit_predict_batches": 1.0,
    "overfit_batches": 0.0, "log_every_n_steps": 50, "check_val_every_n_epoch": 1, "val_check_interval": 1.0,
    "val_check_batch": None, "num_sanity_val_steps": 0, "num_sanity_val_batches": [], "min_epochs": None,
    "min_steps": None, "checkpoint_callback": None, "checkpoint_callbacks": [], "ckpt_path": None,
    "distributed_sampler_kwargs": None, "enable_validation": True, "interrupted": False, "received_sigterm": False,
    "enable_autolog_hparams": True, "node_rank": 0, "scaler": None, "barebones": False, "fast_dev_run": False,
    "profiler": PassThroughProfiler(), "print": rank_zero_only(print), "sanity_checking": False,
    "optimizers": [], "lr_scheduler_configs": [], "current_epoch": 0, "global_step": 0, "current_client": None,
    "train_dataloader": None, "val_dataloaders": None, "test_dataloaders": None, "predict_dataloaders": None,
    **dict.fromkeys(STAGES, False),
}  # fmt: skip


# Names that are computed from others; what they read counts as read by the user. Each client has one loader, whose
# number of batches Lightning gives in a list.
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "model": lambda trainer: trainer.lightning_module,
    "precision_plugin": lambda trainer: trainer.strategy.precision_plugin,
    "evaluating": lambda trainer: trainer.stage in ("validating", "testing"),
    "logged_metrics": lambda trainer: trainer.callback_metrics,
    "progress_bar_metrics": lambda trainer: {name: float(value) for name, value in trainer.callback_metrics.items()},
    "early_stopping_callbacks": lambda trainer: [
        each for each in trainer.peek(["callbacks"])[0] if isinstance(each, both(EarlyStopping))
    ],
    "early_stopping_callback": lambda trainer: next(iter(trainer.early_stopping_callbacks), None),
    "num_val_batches": lambda trainer: [len(each) for each in (trainer.val_dataloaders,) if each is not None],
    "num_test_batches": lambda trainer: [len(each) for each in (trainer.test_dataloaders,) if each is not None],
    "num_predict_batches": lambda trainer: [len(each) for each in (trainer.predict_dataloaders,) if each is not None],
}


class StepsByHand(Protocol):
    """What the strategy hands on of manual optimization inside a client."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss."""

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Take a step of an optimizer."""


class MissingNameError(ConfigurationError, AttributeError):
    """A name of ``self.trainer`` has no meaning in federated training; ``hasattr`` returns False for it."""


class ModuleStrategy(SingleDeviceStrategy):
    """Stands for ``self.trainer.strategy`` with one process, because each process trains clients of its own.

    Args:
        trainer: The module's trainer, which knows whether a client trains or a model is evaluated.

    Attributes:
        fabric: Connects the processes in hooks that all of them call; None before they are started.
        by_hand: Takes the steps of manual optimization while a client trains.
    """

    def __init__(self, trainer: ModuleTrainer) -> None:
        super().__init__()
        self._trainer = trainer
        self.fabric: Fabric | None = None
        self.by_hand: StepsByHand | None = None

    @property
    def root_device(self) -> torch.device:
        """The device on which the module computes."""
        return torch.device("cpu") if self.fabric is None else self.fabric.device

    @property
    def _connecting(self) -> Fabric | None:
        """Fabric in hooks that all processes call; None where each is busy with clients and may wait for nobody."""
        return None if self._trainer.stage is not None else self.fabric

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of a loss, for ``self.manual_backward``."""
        if self.by_hand is None:
            closure_loss.backward(*args, **kwargs)
        else:
            self.by_hand.backward(closure_loss, *args, **kwargs)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step of one of ``self.optimizers()`` in manual optimization."""
        if self.by_hand is None:
            return optimizer.step(closure=closure, **kwargs)
        return self.by_hand.optimizer_step(optimizer, closure, **kwargs)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes in ``setup`` and in the hooks of the run and of rounds, but not inside a client."""
        if self._connecting is not None:
            self._connecting.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process ``src`` in hooks where :meth:`barrier` waits, and ``obj`` itself elsewhere."""
        return obj if self._connecting is None else self._connecting.broadcast(obj, src)


class ModuleTrainer:
    """Gives the module the attributes of its trainer; names without a meaning here raise an error.

    Inside a client the words mean the client's training: ``max_epochs`` are the local epochs, ``current_epoch`` the
    local epoch, ``global_step`` the local steps so far, ``estimated_stepping_batches`` all local steps; of one round,
    or with ``local_schedules: continue`` of all rounds. Outside, ``current_epoch`` is the round.

    Attributes:
        reads: Names that were read since the set was last cleared. A ``configure_optimizers`` that reads any must be
            called again for each client.
        lightning_module: The user's module; None until :meth:`show_module`.
        run: The run that the module belongs to, which ``self.trainer.should_stop = True`` ends after the round.
        collector: Returns the collector of the client or evaluation that runs.
        is_client_stopped: Whether the module has set ``should_stop`` in the client that trains.
    """

    reads: set[str]
    is_client_stopped: bool

    _values: dict[str, Any]

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(reads=set(), lightning_module=None, collector=None, is_client_stopped=False, run=None)
        self.__dict__["_values"] = {**DEFAULTS, "strategy": ModuleStrategy(self), **values}

    def __getattr__(self, name: str) -> Any:
        """Return the value of a name, or raise an error that says which names there are."""
        values = self.__dict__.get("_values", {})
        if name in COMPUTED:
            return COMPUTED[name](self)
        if name.startswith("_") or name not in values:
            properties = [key for key, part in vars(type(self)).items() if isinstance(part, property)]
            raise MissingNameError(
                f"self.trainer.{name} does not exist in federated training; there is: "
                f"{', '.join(sorted([*values, *COMPUTED, *properties]))}."
            )
        # What configure_optimizers reads here may differ between clients, so it decides whether one call serves them
        # all.
        self.__dict__["reads"].add(name)
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set ``should_stop``; other names cannot be set."""
        if name != "should_stop":
            raise MissingNameError(f"self.trainer.{name} cannot be set from the module in federated training.")
        if not self._values["training"]:
            self.run.should_stop = bool(value)
        elif self._values["current_client"] is None:
            raise MissingNameError(
                "self.trainer.should_stop: several clients train at once here, and one cannot be stopped; use "
                "trainer.engine: sequential."
            )
        else:
            self.__dict__["is_client_stopped"] = bool(value)

    # A copy of a module must not copy the whole run: in this process it shares its trainer, and a pickled one keeps
    # those values alone that mean something without the run.

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleTrainer:
        """Return this object itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild it in another process or after the run, with its plain values only."""
        plain = (bool, int, float, str, type(None))
        values = {name: value for name, value in self._values.items() if isinstance(value, plain)}
        return partial(ModuleTrainer, **values), ()

    # Names that are computed. A read of ``self.name`` counts as one of the user's, of ``self._values`` it does not.

    @property
    def stage(self) -> str | None:
        """What this process does with clients: one of :data:`STAGES`, or None in the hooks of rounds and runs."""
        return next((stage for stage in reversed(STAGES) if self._values[stage]), None)

    @property
    def state(self) -> SimpleNamespace:
        """Lightning's ``TrainerState`` of a running fit or evaluation."""
        stage = None if self.stage is None else RunningStage[self.stage.upper()]
        fn = self._values.get("fn", TrainerFn.FITTING)
        return SimpleNamespace(fn=fn, status=TrainerStatus.RUNNING, stage=stage, finished=False, stopped=False)

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch is the last of its local epoch."""
        if self.current_client is None or self.collector is None:
            return False
        return self.collector().num_batches == self._values["num_training_batches"]

    @property
    def should_stop(self) -> bool:
        """Whether the client's training ends after this step; outside of clients, whether the run ends."""
        return self.is_client_stopped if self.training else self.run.should_stop

    # For the framework

    def set(self, **values: Any) -> None:
        """Set values by name."""
        self.__dict__["_values"].update(values)

    def peek(self, names: Iterable[str]) -> tuple[Any, ...]:
        """Return values by name without adding the names to ``reads``."""
        return tuple([self._values[name] for name in names])

    def show_module(self, module: LightningModule, run: Any, fabric: Fabric) -> None:
        """Set the module, its run, and the Fabric that connects the processes."""
        self.__dict__.update(lightning_module=module, run=run)
        self._values["strategy"].connect(module)
        self._values["strategy"].fabric = fabric

    def listen(self, collector: Callable[[], MetricCollector]) -> None:
        """Set the function that returns the current collector."""
        self.__dict__["collector"] = collector

    def start_client(self) -> None:
        """Start a client, which is not stopped by what stopped the client before it."""
        self.__dict__["is_client_stopped"] = False

    def set_optimizers(self, optimizers: list[Any], scheduler_configs: list[Any], *, by_hand: bool) -> None:
        """Set what ``self.optimizers()`` and ``self.lr_schedulers()`` return, for steps ``by_hand`` in wrappers."""
        show_optimizers(self._values["strategy"], optimizers, wrapped=by_hand)
        self.set(optimizers=optimizers, lr_scheduler_configs=scheduler_configs)

    def take_steps_by_hand(self, steps: StepsByHand | None) -> None:
        """Set what takes the steps of manual optimization; None outside of clients."""
        self._values["strategy"].by_hand = steps
