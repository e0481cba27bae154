"""Finds optimizers and schedulers wherever a module keeps them, copies them, and puts them back as they were.

``configure_optimizers`` is no factory: a module may return what it has made in ``__init__``, and may step a scheduler
that it has never returned. What one client, the server or a check before training does to such objects must therefore
happen to copies, or be undone.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fedbc_lightning.core.errors import in_one_line

PLAIN = (Tensor, nn.Module, str, int, float, type(None))


def kept_by(module: nn.Module) -> list[Any]:
    """Return the optimizers and schedulers that a module and its children keep as attributes, also in containers."""
    return list(_found([vars(child) for child in module.modules()], ()))


def with_parts(objects: Sequence[Any]) -> list[Any]:
    """Return optimizers and schedulers and those that they hold in turn, as SAM holds an optimizer."""
    return list(_found(objects, objects))


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """Return the parameters of an optimizer; a scheduler has none."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of Lightning's wrapper, or the optimizer itself."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _found(values: Iterable[Any], known: Iterable[Any]) -> Iterator[Any]:
    """Yield the optimizers and schedulers in values of any depth; those that are known may be of any class."""
    seen, stack, roots = set[int](), [*values], set(map(id, known))
    while stack:
        value = unwrapped(stack.pop())
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, (list, tuple)):
            stack += value
        elif id(value) in roots or isinstance(value, Optimizer) or is_scheduler(value):
            yield value
            stack += [each for name, each in vars(value).items() if name not in ("state", "param_groups")]


def is_scheduler(value: Any) -> bool:
    """Return whether a value is a scheduler of torch's class, or of any other that steps and holds its optimizer."""
    attributes = getattr(value, "__dict__", None)
    holds = type(attributes) is dict and isinstance(attributes.get("optimizer"), Optimizer)
    return isinstance(value, LRScheduler) or (holds and hasattr(type(value), "step"))


class KeptState:
    """Everything that some optimizers and schedulers hold at one moment, and what they share.

    ``state_dict`` would not do: classes of other packages leave things out of it, and torch's ``Optimizer`` drops the
    attributes of its subclasses when it is copied. Parameters and modules are never copied, nor are hooks.

    Args:
        objects: The optimizers and schedulers.
        module: The module that they belong to.

    Raises:
        ConfigurationError: One of them holds something that cannot be copied.
    """

    def __init__(self, objects: Iterable[Any], module: nn.Module) -> None:
        self.module, self._objects = module, list(objects)
        parameters = [parameter for each in self._objects for parameter in parameters_of(each)]
        self._shared = {id(each): each for each in (*module.modules(), *module.parameters(), *parameters)}
        self._copies = self._write(self._objects, list(map(_hollow, self._objects)))

    def holds(self, objects: Iterable[Any]) -> bool:
        """Return whether any of some objects is one of these."""
        mine = set(map(id, self._objects))
        return any(id(each) in mine for each in objects)

    def restore(self) -> None:
        """Put the objects themselves back into this state."""
        self._write(self._copies, self._objects)

    def copies(self) -> dict[int, Any]:
        """Return a copy of each object in this state, by the ``id`` of the object; it is no object's step that counts.

        A scheduler puts a function around its optimizer's ``step``, which would step the optimizer that was copied.
        """
        copies = self._write(self._copies, list(map(_hollow, self._objects)))
        for each in copies:
            vars(each).pop("step", None)
        return {id(mine): its for mine, its in zip(self._objects, copies, strict=True)}

    def _write(self, sources: list[Any], targets: list[Any]) -> list[Any]:
        memo = self._shared | {id(source): target for source, target in zip(sources, targets, strict=True)}
        for source, target in zip(sources, targets, strict=True):
            who = f"model: {type(source).__name__} of configure_optimizers holds what cannot be copied"
            advice = "), and every client starts with it as it is now; keep that elsewhere."
            with in_one_line(f"{who} (", advice):
                attributes = {
                    name: vars(target).get(name, OrderedDict())
                    if name.endswith("_hooks")
                    else copy.deepcopy(value, memo)
                    for name, value in vars(source).items()
                }
            vars(target).clear()
            vars(target).update(attributes)
        return targets


def _hollow(value: Any) -> Any:
    return object.__new__(type(value))
