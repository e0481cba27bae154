"""Turns ``--optimizer`` and ``--lr_scheduler`` into a factory, because each client needs its own optimizer."""

from __future__ import annotations

from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import ReduceLROnPlateau, instantiate_class

from fedbc_lightning.core.errors import ConfigurationError


def override_configure_optimizers(
    model: LightningModule, optimizer: dict[str, Any] | None, lr_scheduler: dict[str, Any] | None
) -> None:
    """Make ``model.configure_optimizers`` build the optimizer of the command line anew on each call.

    LightningCLI builds one optimizer and returns it on every call; a federated run needs a new one per client.

    Args:
        model: Module whose method is replaced, unless ``optimizer`` is None.
        optimizer: ``{"class_path": ..., "init_args": {...}}`` or None.
        lr_scheduler: A mapping of the same form, or None. It is stepped once per local epoch,
            :class:`ReduceLROnPlateau` with the metric ``monitor``.

    Raises:
        ConfigurationError: A scheduler is given without an optimizer.
    """
    if not optimizer:
        if lr_scheduler:
            raise ConfigurationError("lr_scheduler needs an optimizer: give --optimizer too, e.g. --optimizer SGD")
        return

    def configure_optimizers(self: LightningModule) -> Any:
        made = instantiate_class(self.parameters(), optimizer)
        if not lr_scheduler:
            return made
        scheduler = instantiate_class(made, lr_scheduler)
        if isinstance(scheduler, ReduceLROnPlateau):
            return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "monitor": scheduler.monitor}}
        return [made], [scheduler]

    model.configure_optimizers = MethodType(configure_optimizers, model)  # type: ignore[method-assign]
