"""``self.trainer`` as the user's module sees it inside federated training."""

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
"""Classes of values that mean the same in another process."""


class Stoppable(Protocol):
    """A run, as far as the user's module may change it: ``self.trainer.should_stop = True`` ends it after the round."""

    should_stop: bool


class MissingNameError(ConfigurationError, AttributeError):
    """A name of ``self.trainer`` that means nothing in federated training; ``hasattr`` sees it as missing."""


class ModuleTrainer:
    """Answers what a module may ask its trainer; anything else raises with what to use instead.

    Inside a client the words mean the client's training: ``max_epochs`` are the local epochs, ``current_epoch`` the
    local epoch, ``global_step`` the local steps so far, ``estimated_stepping_batches`` all local steps; of one round,
    or with ``local_schedules: continue`` of all rounds. Outside, ``current_epoch`` is the round.

    Attributes:
        reads: The names that were read since it was last emptied; of a name that is computed, those it is made of.
        lightning_module: The user's module; None until :meth:`show_module`.
        run: The run that the module belongs to.
        collector: Returns what collects the values logged at the moment.
        is_client_stopped: Whether the module has set ``should_stop`` inside the client that trains at the moment.
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
        """The value, or an error that says what to use instead."""
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
        """Modules may write ``should_stop`` and nothing else."""
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
        """Itself: a copy of what asks its trainer something must not take the whole run with it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, or after the run, it still answers with the values that are plain."""
        values = {name: value for name, value in self._values.items() if isinstance(value, PLAIN)}
        return _with_values, (values,)

    # for the framework

    def set(self, **values: Any) -> None:
        """Give new values."""
        self.__dict__["_values"].update(values)

    def peek(self, names: Iterable[str]) -> tuple[Any, ...]:
        """Values by name, without taking down that they were read."""
        return tuple([self._values[name] for name in names])

    def show_module(self, module: LightningModule, run: Stoppable, fabric: Fabric) -> None:
        """Say whose trainer this is, in which run, and what joins its processes."""
        self.__dict__.update(lightning_module=module, run=run)
        self._values["strategy"].fabric = fabric

    def listen(self, collector: Callable[[], MetricCollector]) -> None:
        """Say where the values logged at the moment are found."""
        self.__dict__["collector"] = collector

    def start_client(self) -> None:
        """A client begins: what stopped the one before does not stop it."""
        self.__dict__["is_client_stopped"] = False

    def set_optimizer(self, optimizer: Any, scheduler_configs: list[Any]) -> None:
        """Say what ``self.optimizers()`` and ``self.lr_schedulers()`` return."""
        show_optimizers(self._values["strategy"], [optimizer])
        self.set(optimizers=[optimizer], lr_scheduler_configs=scheduler_configs)


def _with_values(values: dict[str, Any]) -> ModuleTrainer:
    return ModuleTrainer(**values)
