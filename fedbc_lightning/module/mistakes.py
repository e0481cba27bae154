"""Says at which client, round and batch a step of the user failed, and refuses a loss that has no gradient."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from fedbc_lightning.core.errors import ConfigurationError, locate
from fedbc_lightning.core.text import called


def refuse_loss(loss: Tensor, module: Module) -> None:
    """Raise if a loss is not one number with a gradient; torch's own errors do not name the step that returned it.

    Args:
        loss: What ``training_step`` returned.
        module: The user's module.

    Raises:
        ConfigurationError: The loss has several elements, or no gradient leads from it to the parameters.
    """
    if loss.numel() == 1 and loss.requires_grad:
        return
    problem = "without a gradient; compute it from the outputs of the model's own layers, without .detach() or no_grad"
    if loss.numel() != 1:
        problem = f"of shape {tuple(loss.shape)}; return one number, such as loss.mean()"
    raise ConfigurationError(f"model: {place_of(module, 'training_step')} returned a loss {problem}.")


def locate_step(error: Exception, place: str, batch: Any = None) -> None:
    """Note on an exception of a user's step where in the run it came up, and the form of its batch.

    Shapes, kinds of numbers and labels that do not fit the model are the usual reasons, and torch's messages name only
    one side of such a misfit.

    Args:
        error: The exception, which the caller raises again afterwards.
        place: Client, round and batch.
        batch: The batch, or None if it could not be made.
    """
    locate(error, place if batch is None else f"{place}: {forms(batch)}")


def place_in_run(who: int | str, round: int, names: Sequence[str] | None = None) -> str:
    """Return a client or several, and the round, for a note on an exception; trials before round 1 are in no round.

    Args:
        who: Number of the client, or what is said of several.
        round: Number of the round.
        names: Names of all clients, if they have some.
    """
    who = called(who, names) if isinstance(who, int) else who
    return f"{who}, round {round}" if round else who


def place_of(owner: Any, method: str) -> str:
    """Return a method's name with the class, file and line that define it."""
    name, function = f"{type(owner).__name__}.{method}", inspect.unwrap(getattr(owner, method))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return name if code is None else f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def forms(batch: Any) -> str:
    """Return the shapes and kinds of the tensors in a batch, and the range of whole numbers such as labels.

    Example:
        >>> import torch
        >>> forms([torch.zeros(8, 3), torch.arange(8)]), forms({"x": torch.zeros(2)}), forms([])
        ('(8, 3) float32, (8,) int64 from 0 to 7', 'x: (2,) float32', 'no tensor')
    """
    return ", ".join(f"{name}{_form(tensor)}" for name, tensor in _tensors(batch)) or "no tensor"


def _form(tensor: Tensor) -> str:
    # After a device-side assert nothing can be read from a GPU any more, so values of the CPU alone are shown.
    is_readable = tensor.is_cpu and tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex()
    values = f" from {int(tensor.min())} to {int(tensor.max())}" if is_readable else ""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{values}"


def _tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from _tensors(part, f"{key}: ")
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _tensors(part, name)
