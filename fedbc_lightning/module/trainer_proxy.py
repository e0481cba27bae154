"""Stands for ``self.trainer`` of the user's module inside federated training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.private_lightning import show_optimizers
from fedbc_lightning.module.trainer_names import DERIVED, FIXED, INSTEAD, ModuleStrategy

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule

    from fedbc_lightning.module.collector import MetricCollector


PLAIN = (bool, int, float, str, type(None))
"""Classes of values that a copy in another process keeps."""


class Stoppable(Protocol):
    """A run that the user's module may stop: ``self.trainer.should_stop = True`` ends it after the round."""

    should_stop: bool


class MissingNameError(ConfigurationError, AttributeError):
    """A name of ``self.trainer`` has no meaning in federated training; ``hasattr`` returns False for it."""


class ModuleTrainer:
    """Gives the module the attributes of its trainer; others raise an error that says what to use instead.

    Inside a client the words mean the client's training: ``max_epochs`` are the local epochs, ``current_epoch`` the
    local epoch, ``global_step`` the local steps so far, ``estimated_stepping_batches`` all local steps; of one round,
    or with ``local_schedules: continue`` of all rounds. Outside, ``current_epoch`` is the round.

    Attributes:
        reads: Names that were read since the set was last cleared; a computed name counts as the names it is computed
            from.
        lightning_module: The user's module; None until :meth:`show_module`.
        run: The run that the module belongs to.
        collector: Returns the collector of the client or evaluation that runs.
        is_client_stopped: Whether the module has set ``should_stop`` in the client that trains.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__["_values"] = {
            "optimizers": [],
            "lr_scheduler_configs": [],
            "strategy": ModuleStrategy(self),
            "training": False,
            "validating": False,
            "testing": False,
            "predicting": False,
            "sanity_checking": False,
            "fast_dev_run": False,
            "current_epoch": 0,
            "global_step": 0,
            "current_client": None,
            "barebones": False,
            "train_dataloader": None,
            "val_dataloaders": None,
            "test_dataloaders": None,
            "predict_dataloaders": None,
            **FIXED,
            **values,
        }
        self.__dict__["reads"] = set()
        self.__dict__["lightning_module"] = None
        self.__dict__["collector"] = None
        self.__dict__["is_client_stopped"] = False
        self.__dict__["run"] = None

    def __getattr__(self, name: str) -> Any:
        """Return the value of a name, or raise an error that says what to use instead."""
        values = self.__dict__.get("_values", {})
        if name in DERIVED:
            sources, compute = DERIVED[name]
            self.__dict__["reads"].update(sources)
            return compute(self, values)
        if name.startswith("_") or name not in values:
            raise MissingNameError(self._why_missing(name))
        self.__dict__["reads"].add(name)
        return values[name]

    def _why_missing(self, name: str) -> str:
        if name in INSTEAD:
            return f"self.trainer.{name} does not exist in federated training: {INSTEAD[name]}."
        known = ", ".join(sorted({*self.__dict__.get("_values", {}), *DERIVED}))
        return f"self.trainer.{name} does not exist in federated training; there is: {known}."

    def __setattr__(self, name: str, value: Any) -> None:
        """Set ``should_stop``; other names cannot be set."""
        if name != "should_stop":
            raise MissingNameError(f"self.trainer.{name} cannot be set from the module in federated training.")
        self.__dict__["reads"].add("max_steps")  # a step that stops its client is no function of weights and batch
        if not self._values["training"]:
            self.run.should_stop = bool(value)
        elif self._values["current_client"] is None:
            raise MissingNameError(
                "self.trainer.should_stop: several clients train at once here, and one cannot be stopped; use "
                "trainer.engine: sequential."
            )
        else:
            self.__dict__["is_client_stopped"] = bool(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleTrainer:
        """Return this object itself, because a copy of a module must not copy the whole run."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild it in another process or after the run, with its plain values only."""
        values = {name: value for name, value in self._values.items() if isinstance(value, PLAIN)}
        return _with_values, (values,)

    # for the framework

    def set(self, **values: Any) -> None:
        """Set values by name."""
        self.__dict__["_values"].update(values)

    def peek(self, names: Iterable[str]) -> tuple[Any, ...]:
        """Return values by name without adding the names to ``reads``."""
        return tuple([self._values[name] for name in names])

    def show_module(self, module: LightningModule, run: Stoppable, fabric: Fabric) -> None:
        """Set the module, its run, and the Fabric that connects the processes."""
        self.__dict__.update(lightning_module=module, run=run)
        self._values["strategy"].fabric = fabric

    def listen(self, collector: Callable[[], MetricCollector]) -> None:
        """Set the function that returns the current collector."""
        self.__dict__["collector"] = collector

    def start_client(self) -> None:
        """Start a client, which is not stopped by what stopped the client before it."""
        self.__dict__["is_client_stopped"] = False

    def set_optimizer(self, optimizer: Any, scheduler_configs: list[Any]) -> None:
        """Set what ``self.optimizers()`` and ``self.lr_schedulers()`` return."""
        show_optimizers(self._values["strategy"], [optimizer])
        self.set(optimizers=[optimizer], lr_scheduler_configs=scheduler_configs)


def _with_values(values: dict[str, Any]) -> ModuleTrainer:
    return ModuleTrainer(**values)
