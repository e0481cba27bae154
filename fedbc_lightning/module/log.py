"""Replaces ``self.log`` of the user's module inside federated training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.module.collector import MetricCollector


class ModuleLog:
    """Passes what a module logs to the collector of the client or evaluation that runs.

    The module keeps the method :meth:`log` among its attributes. A copy of the module, by ``copy.deepcopy`` or pickle,
    must not copy the whole run with it: what a copy logs is dropped, as in Lightning.

    Args:
        collector: Returns the collector of the logged values; None drops them.

    Attributes:
        on_screen: Names that were logged with ``prog_bar=True``, in the order of their first calls.
    """

    def __init__(self, collector: Callable[[], MetricCollector] | None = None) -> None:
        self._collector = collector
        self.on_screen: dict[str, None] = {}

    def __reduce__(self) -> tuple[type[ModuleLog], tuple[()]]:
        """Return how to make a copy, which drops what it logs."""
        return type(self), ()

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *,
        batch_size: int | None = None,
        **ignored: Any,
    ) -> None:
        """Log one value, with Lightning's arguments; those without a meaning inside a client are ignored."""
        if isinstance(value, Mapping):
            raise ConfigurationError(f"self.log('{name}'): got a dict; use self.log_dict.")
        if prog_bar:
            self.on_screen[name] = None
        if self._collector is not None and (on_step is not False or on_epoch is not False):
            self._collector().log(name, value, reduce_fx=reduce_fx, batch_size=batch_size)
