"""A run as users and callbacks see it: attributes of the trainer, with Lightning's names; a round is an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Callback

from fedbc_lightning.distributed.fabric import make_fabric
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.module.trainer_names import NAMES
from fedbc_lightning.run.run import Outcome, Progress, Run
from fedbc_lightning.run.run_record import FitResult
from fedbc_lightning.run.run_writer import Recorder
from fedbc_lightning.run.settings import RunSettings


class RunView:
    """Shows settings, progress and state of a run as attributes of ``FederatedTrainer``.

    Lightning's names for a run under way are those of the trainer that hooks are given
    (:class:`~fedbc_lightning.module.trainer_proxy.ModuleTrainer`), which in turn has all names of this class. Our own
    callbacks name this class as its type. Lightning's Callback names its own Trainer there, hence their
    ``type: ignore[override]``.

    Args:
        settings: What the user chose; its attributes are attributes of the trainer.

    Attributes:
        callbacks: The user's callbacks and the progress bar.
        progress: How far the last run has come; its attributes are attributes of the trainer.
        state: Lightning's name for the verb that runs, ``state.fn``.
    """

    callbacks: list[Callback]

    def __init__(self, settings: RunSettings) -> None:
        self.settings, self.progress = settings, Progress()
        self.state = SimpleNamespace(fn=None, stage=None)
        self._fabric = make_fabric(
            settings.accelerator, settings.strategy, settings.devices, settings.num_nodes, settings.precision,
            settings.max_restarts,
        )  # fmt: skip
        self._run: Run | None = None
        self._recorder: Recorder | None = None
        self._outcome: Outcome | None = None

    @property
    def recorder(self) -> Recorder:
        """Recorder of the last training run, which writes its tables and checkpoints."""
        if self._recorder is None:
            raise AttributeError
        return self._recorder

    @property
    def result(self) -> FitResult:
        """What the last training run has recorded, as :meth:`fit` returns it; also after a run was interrupted."""
        if self._outcome is not None and isinstance(self._outcome.result, FitResult):
            return self._outcome.result
        return self.recorder.result()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that one of the trainer's parts has under the same name."""
        # Also called for a name whose property raises AttributeError, and for any name while a copy is unpickled.
        run = self.__dict__.get("_run")
        if name in NAMES and name not in _PART_OF and run is not None:
            return getattr(run.shim, name)
        part = _PART_OF[name](self) if name in _PART_OF else None
        if part is None:
            raise AttributeError(
                f"'{type(self).__name__}' object has no '{name}' in this process: there is "
                "none before a run, nor after a run in processes that it started"
            )
        return getattr(part, name)

    def __dir__(self) -> list[str]:
        """Return the names of the parts, too."""
        return [*super().__dir__(), *_PART_OF]

    def __setattr__(self, name: str, value: Any) -> None:
        """Give the part another value, as callbacks do: ``trainer.should_stop = True``."""
        if name in NAMES and name not in _PART_OF and name not in ("callbacks", "state"):
            raise AttributeError(f"{type(self).__name__}.{name} tells how a run goes on, and cannot be set")
        is_of_part = name in _PART_OF and not hasattr(type(self), name)
        object.__setattr__(_PART_OF[name](self) if is_of_part else self, name, value)


def _federation(trainer: RunView) -> Federation | None:
    return None if trainer._run is None else trainer._run.federation


# The part that has an attribute, so that an option of the trainer is an attribute without being named here. A later
# line counts more: ``seed`` is that which the run has taken. After a run in other processes, see its outcome.
_PART_OF: dict[str, Callable[[RunView], Any]] = {
    **{field.name: lambda trainer: trainer.settings for field in fields(RunSettings) if field.name != "callbacks"},
    **dict.fromkeys(("server", "clients"), lambda trainer: _federation(trainer) or trainer._outcome),
    **dict.fromkeys(("seed", "evaluator", "federation", "datamodule"), lambda trainer: trainer._run),
    "layout": _federation,
    **dict.fromkeys(("is_global_zero", "global_rank", "world_size"), lambda trainer: trainer._fabric),
    **dict.fromkeys(("logger", *(field.name for field in fields(Progress))), lambda trainer: trainer.progress),
}
