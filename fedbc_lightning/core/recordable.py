"""The promise that a step is a function of weights and batch, so that it may be recorded, and need not be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch import LightningModule

from fedbc_lightning.core.origin import is_ours

Function = TypeVar("Function", bound=Callable[..., Any])

PROMISE = "__fedbc_recordable__"


def recordable(function: Function) -> Function:
    """Promise that a module's step is a function of weights and batch, as a decorator.

    Its loss and what it logs then depend on the parameters, the batch and settings that stay the same within a round,
    and it changes nothing. A ``training_step`` is recorded and replayed, see ``record_steps`` of
    :class:`~fedbc_lightning.FederatedTrainer`. With a ``validation_step`` or ``test_step`` so marked, models of clients
    that have not trained since are not evaluated again, unless a hook of yours could have changed such a setting; one
    in 64 is evaluated all the same, and compared.

    A subclass that overrides ``__init__`` (its layers may keep state), ``training_step`` or another method of the
    class, apart from Lightning's hooks, gives the promise anew: ``training_step = recordable(Base.training_step)``.

    Args:
        function: The step, which is returned as it is.

    Example:
        >>> class Model(LightningModule):
        ...     @recordable
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).mean()
        >>> is_promised(Model())
        True
    """
    # The value is the function itself: functools.wraps copies attributes to wrappers, for which nobody promises.
    setattr(function, PROMISE, function)
    return function


def is_promised(module: LightningModule, step: str = "training_step") -> bool:
    """Return whether the module's step is marked by :func:`recordable`, and no subclass has changed what it calls."""
    kinds = type(module).__mro__
    function = getattr(type(module), step, None)
    if getattr(function, PROMISE, None) is not function or step in vars(module):
        return False
    place = next(k for k, kind in enumerate(kinds) if step in vars(kind))
    # Lightning's own hooks are called beside the step; everything else that the class defines may be a part of it.
    parts = {name for kind in kinds[place:] if not issubclass(LightningModule, kind) for name in vars(kind)}
    parts = {name for name in parts if name == "forward" or not hasattr(LightningModule, name)}
    if any(callable(vars(module).get(name)) for name in parts):  # ``module.forward = ...``
        return False
    # A subclass that makes its own layers runs code for which the base class cannot promise.
    parts |= {"__init__", "__getattr__", "log", "log_dict", "setup", "configure_model"}
    return not any(parts & vars(kind).keys() for kind in kinds[:place] if not is_ours(kind))
