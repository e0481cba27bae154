"""The trainer that hooks of module, callbacks and data module are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.private_lightning import show_optimizers
from fedbc_lightning.module.trainer_names import MISSING, NAMES, STAGES

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule

    from fedbc_lightning.module.collector import MetricCollector


_meant = cache(did_you_mean)  # because hasattr may ask for the same name in each step


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
    """The trainer of the module, of callbacks and of the data module, inside of a run.

    :data:`~fedbc_lightning.module.trainer_names.NAMES` says what Lightning's names mean; inside a client they mean that
    client's training. Any other name is one of the :class:`FederatedTrainer`.

    Attributes:
        reads: Names that were read since the set was last cleared. A ``configure_optimizers`` that reads any must be
            called again for each client.
        view: The FederatedTrainer; None in a copy that left the run.
        lightning_module: The user's module; None until :meth:`show_module`.
        collector: Returns the collector of the client or evaluation that runs.
        is_client_stopped: Whether the module has set ``should_stop`` in the client that trains.
        is_callback: Whether a hook of a callback runs.
        limits: Values that hold outside of clients, where the largest client is meant.
        make_loader: Makes the largest client's loader; None before the data are set up.
    """

    reads: set[str]
    is_client_stopped: bool

    _values: dict[str, Any]

    def __init__(self, view: Any = None, **values: Any) -> None:
        self.__dict__.update(
            reads=set(), view=view, lightning_module=None, collector=None, is_client_stopped=False, is_callback=False,
            limits={}, make_loader=None,
        )  # fmt: skip
        known = {name: known.value for name, known in NAMES.items()}
        self.__dict__["_values"] = {**known, "strategy": ModuleStrategy(self), "current_client": None, **values}

    def __getattr__(self, name: str) -> Any:
        """Return the value of a name, or raise an error that says which name is meant."""
        known = NAMES.get(name)
        if known is not None and known.compute is not None:
            return known.compute(self)
        values, view = self.__dict__.get("_values", {}), self.__dict__.get("view")
        if name in values:
            # What configure_optimizers reads here may differ between clients, so it decides whether one call serves
            # them all.
            self.__dict__["reads"].add(name)
            return values[name]
        if name not in MISSING and not name.startswith("_"):
            self.__dict__["reads"].add(name)
            try:
                return getattr(view, name)
            except AttributeError:
                if name in dir(view):
                    raise
        why = MISSING.get(name) or _meant(name, (*NAMES, *dir(view)), "no name is like it")
        raise MissingNameError(
            f"self.trainer.{name} does not exist in federated training: {why} (all names: docs/reference/trainer.md)"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set ``should_stop``, or what is the FederatedTrainer's or new; Lightning's other names cannot be set."""
        if name != "should_stop":
            if name in NAMES or name in MISSING or name in self.__dict__ or name in self._values:
                raise MissingNameError(f"self.trainer.{name} cannot be set in federated training.")
            setattr(self.view, name, value)
        elif not self._values["training"] or self.is_callback:
            # A client that a callback's clock stops would not be the same in a run that resumes.
            self.view.should_stop = bool(value)
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
        of_run = {name: getattr(self.view, name) for name in ("current_round", "max_rounds") if self.view is not None}
        values = {name: value for name, value in (self._values | of_run).items() if isinstance(value, plain)}
        return partial(ModuleTrainer, **values), ()

    # Names that are computed. A read of ``self.name`` counts as one of the user's, of ``self._values`` it does not.

    @property
    def is_in_client(self) -> bool:
        """Whether one client trains."""
        return self._values["training"] and self._values["current_client"] is not None

    @property
    def stage(self) -> str | None:
        """What this process does with clients: one of :data:`STAGES`, or None in the hooks of rounds and runs."""
        return next((stage for stage in reversed(STAGES) if self._values[stage]), None)

    @property
    def training(self) -> bool:
        """Whether the verb is ``fit`` and no model is evaluated."""
        is_fit = self.view is not None and self.view.state.fn == TrainerFn.FITTING
        return self.stage == "training" or (self.stage is None and is_fit)

    @property
    def state(self) -> SimpleNamespace:
        """Lightning's ``TrainerState`` of a running fit or evaluation."""
        name = "training" if self.training else self.stage
        stage = None if name is None else RunningStage[name.upper()]
        fn = TrainerFn.FITTING if self.view is None else self.view.state.fn
        return SimpleNamespace(fn=fn, status=TrainerStatus.RUNNING, stage=stage, finished=False, stopped=False)

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch is the last of its local epoch."""
        is_in_batch = self.current_client is not None and self.collector is not None
        return is_in_batch and self.collector().num_batches == self._values["num_training_batches"]

    @property
    def should_stop(self) -> bool:
        """Whether the client's training ends after this step; outside of clients, whether the run ends."""
        return self.is_client_stopped if self._values["training"] and not self.is_callback else self.view.should_stop

    def counted(self, name: str) -> int:
        """Return ``current_epoch`` or ``global_step``: what the client has counted, or else the number of the round."""
        self.reads.add(name)
        if self.view is None or self.is_in_client:
            return self._values[name] or 0
        return self.view.current_round

    def loader_of_client(self) -> Any:
        """Return the loader of the client that trains, or else of the largest client; None outside of ``fit``."""
        self.reads.add("train_dataloader")
        if self.is_in_client or self.make_loader is None:
            return self._values["train_dataloader"]
        return self.make_loader()

    def metrics(self, kind: str) -> dict[str, Any]:
        """Return what the client has logged, by Lightning's names, or else the metrics of the run.

        Args:
            kind: The dictionary of Lightning that is meant: ``callback``, ``log`` or ``pbar``.
        """
        self.reads.add("callback_metrics")
        if self.is_in_client and self.collector is not None:
            return self.collector().shown(kind)
        found = {} if self.view is None else self.view.callback_metrics
        return {name: float(value) for name, value in found.items()} if kind == "pbar" else found

    # For the framework

    def set(self, **values: Any) -> None:
        """Set values by name."""
        self.__dict__["_values"].update(values)

    def peek(self, names: Iterable[str]) -> tuple[Any, ...]:
        """Return values by name without adding the names to ``reads``."""
        return tuple([self._values[name] if name in self._values else getattr(self.view, name) for name in names])

    def show_module(self, module: LightningModule, fabric: Fabric) -> None:
        """Set the module and the Fabric that connects the processes."""
        self.__dict__["lightning_module"] = module
        self._values["strategy"].connect(module)
        self._values["strategy"].fabric = fabric

    def listen(self, collector: Callable[[], MetricCollector]) -> None:
        """Set the function that returns the current collector."""
        self.__dict__["collector"] = collector

    def show_largest_client(self, limits: Mapping[str, Any], loader: Callable[[], Any]) -> None:
        """Set what holds outside of clients: limits of the largest client's training, and what makes its loader."""
        self.__dict__.update(limits=limits, make_loader=loader)
        self.leave_clients()

    def leave_clients(self) -> None:
        """Show what holds outside of clients."""
        self.set(**self.limits, current_client=None, training=False)

    def start_client(self) -> None:
        """Start a client, which is not stopped by what stopped the client before it."""
        self.__dict__["is_client_stopped"] = False

    @contextmanager
    def in_callback(self) -> Iterator[None]:
        """Let ``should_stop`` mean the run, because a hook of a callback runs inside."""
        self.__dict__["is_callback"] = True
        try:
            yield
        finally:
            self.__dict__["is_callback"] = False

    def set_optimizers(self, optimizers: list[Any], scheduler_configs: list[Any], *, by_hand: bool) -> None:
        """Set what ``self.optimizers()`` and ``self.lr_schedulers()`` return, for steps ``by_hand`` in wrappers."""
        show_optimizers(self._values["strategy"], optimizers, wrapped=by_hand)
        self.set(optimizers=optimizers, lr_scheduler_configs=scheduler_configs)

    def take_steps_by_hand(self, steps: StepsByHand | None) -> None:
        """Set what takes the steps of manual optimization; None outside of clients."""
        self._values["strategy"].by_hand = steps
