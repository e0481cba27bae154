"""``--optimizer`` and ``--lr_scheduler`` as a factory: each client gets an optimizer of its own."""

from __future__ import annotations

from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import ReduceLROnPlateau, instantiate_class

from fedbc_lightning.core.errors import ConfigurationError


def override_configure_optimizers(
    model: LightningModule, optimizer: dict[str, Any] | None, lr_scheduler: dict[str, Any] | None
) -> None:
    """Let ``model.configure_optimizers`` build what the command line names, anew on each call.

    LightningCLI builds one optimizer and returns it again and again; a federated run asks for a fresh one per client.

    Args:
        model: The module whose method is replaced; untouched where ``optimizer`` is None.
        optimizer: ``{"class_path": ..., "init_args": {...}}`` or None.
        lr_scheduler: Likewise; stepped once per local epoch, :class:`ReduceLROnPlateau` on its ``monitor``.

    Raises:
        ConfigurationError: If a scheduler is given without an optimizer.
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
