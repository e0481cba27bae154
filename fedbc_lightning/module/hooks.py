"""Finds the hooks that callbacks and the user's module override, and calls only these.

Names and arguments are Lightning's: a callback gets ``(trainer, pl_module, *arguments)``, the module ``(*arguments)``.
Callbacks are called first. ``docs/howto/hooks.md`` has a table of the events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule

from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.module.trainer_proxy import ModuleTrainer

STEP_HOOKS = (
    "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step",
)  # fmt: skip
CLIENT_HOOKS = ("on_client_start", "on_client_end", "on_train_epoch_start", "on_train_epoch_end")


class Hooks:
    """Calls the overridden hooks of a run.

    Args:
        trainer: The trainer that callbacks are given.
        module: The user's module, whose own hooks are called after those of callbacks.
        callbacks: The callbacks, in the order in which they are called.

    Attributes:
        trainer: The same.
        callbacks: The same.
    """

    def __init__(self, trainer: ModuleTrainer, module: LightningModule, callbacks: Sequence[Callback]) -> None:
        self.trainer = trainer
        self._module = module
        self.callbacks = list(callbacks)
        self._found: dict[str, tuple[list[Callable], Callable | None]] = {}

    def listens(self, name: str) -> bool:
        """Return whether a callback or the module overrides the hook."""
        return any(self._find(name))

    def is_heard(self, name: str) -> bool:
        """Return whether the module or a callback of the user's overrides the hook; our own callbacks write nothing."""
        owners = [(self._module, LightningModule), *((callback, Callback) for callback in self.callbacks)]
        return any(overrides(owner, name, base) for owner, base in owners if not is_ours(owner))

    @property
    def is_there_any(self) -> bool:
        """Whether the module or a callback of the user's overrides any hook."""
        owners = (self._module, *self.callbacks)
        names = {name for x in owners for name in dir(x) if name.startswith("on_") and callable(getattr(x, name, None))}
        return any(map(self.is_heard, names))

    def call(self, name: str, *args: Any) -> Any:
        """Call the hook of the callbacks, then that of the module, and return what the module's hook returned."""
        self.call_callbacks(name, *args)
        return self.call_module(name, *args)

    def call_module(self, name: str, *args: Any) -> Any:
        """Call the hook on the module alone."""
        _, own = self._find(name)
        return own(*args) if own is not None else None

    def call_callbacks(self, name: str, *args: Any) -> None:
        """Call the hook on the callbacks alone."""
        methods = self._find(name)[0]
        if methods:
            with self.trainer.in_callback():
                for method in methods:
                    method(self.trainer, self._module, *args)

    def call_callback(self, callback: Callback, name: str, *args: Any) -> None:
        """Call the hook on one of the callbacks, whether it overrides it or not."""
        with self.trainer.in_callback():
            getattr(callback, name)(self.trainer, self._module, *args)

    def _find(self, name: str) -> tuple[list[Callable], Callable | None]:
        # Asked before every batch. Finding out anew which methods are overridden would cost more than most hooks do.
        if name not in self._found:
            callbacks = [getattr(c, name) for c in self.callbacks if overrides(c, name, Callback)]
            own = getattr(self._module, name) if overrides(self._module, name, LightningModule) else None
            self._found[name] = (callbacks, own)
        return self._found[name]
