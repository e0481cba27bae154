"""Explains in one line the errors that torch raises for a wrong loss, wrong labels or inputs that do not fit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.tracebacks import locate, users_frame

_LABELS = re.compile(r"Target -?\d+ is out of bounds")
_INDEX = re.compile(r"index out of range in self")
_DEVICE = re.compile(r"device-side assert triggered")
_SHAPES = re.compile(
    r"shapes cannot be multiplied|[Ss]ize mismatch|must match the size of tensor|^Given groups=|^Expected \d.*input|"
    r"expected input\[|is invalid for input of size|to match target batch_size|input and target (shapes|sizes)|"
    r"target size \(|running_mean should contain|normalized_shape="
)
_KINDS = re.compile(
    r"expected scalar type|expected target dtype|must have the same dtype|should be the same$|not implemented for '|"
    r"Found dtype|Expected tensor for argument"
)
_CLASSES = "give the model as many outputs as there are classes, and number the classes from 0"


def refuse_loss(loss: Tensor, module: Module, batch: Any) -> None:
    """Raise if a loss is not one number with a gradient; torch's own errors do not name the step that returned it.

    Args:
        loss: What ``training_step`` returned.
        module: The user's module.
        batch: The batch of the step.

    Raises:
        ConfigurationError: The loss has several elements, or no gradient leads from it to the parameters.
    """
    place = f"model: {place_of(module, 'training_step')} returned"
    if loss.numel() != 1:
        raise ConfigurationError(
            f"{place} a loss of shape {tuple(loss.shape)} for a batch of {forms(batch)}; return one number, such as "
            "loss.mean()."
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            f"{place} a loss without a gradient; compute it from the outputs of the model's own layers, without "
            ".detach(), .item(), argmax or torch.no_grad()."
        )


def raise_located(error: Exception, place: str, batch: Any = None) -> None:
    """Note on an exception at which place in the run it came up, or raise a better one if torch's says little.

    Args:
        error: The exception, which the caller raises again afterwards.
        place: Client, round and batch.
        batch: The batch, or None if it could not be made.

    Raises:
        ConfigurationError: The batch does not fit the model.
    """
    better = explained(error, batch)
    locate(better or error, place)
    if better is not None:
        raise better from error


def place_in_run(who: str, round: int) -> str:
    """Return a client or several, and the round, for a note on an exception; trials before round 1 are in no round."""
    return f"{who}, round {round}" if round else who


def place_of(owner: Any, method: str) -> str:
    """Return a method's name with the class, file and line that define it."""
    name, function = f"{type(owner).__name__}.{method}", inspect.unwrap(getattr(owner, method))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return name if code is None else f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def explained(error: Exception, batch: Any) -> ConfigurationError | None:
    """Return an error in one line for labels, shapes or kinds of numbers that do not fit the model; None for others.

    Args:
        error: What a step of the user's raised.
        batch: The batch of the step, or None if there was no step.
    """
    if batch is None or isinstance(error, ConfigurationError):
        return None
    said = first_line(error).rstrip(".")
    how = _how_to_mend(said, batch) if isinstance(error, (RuntimeError, IndexError, ValueError)) else None
    if how is None:
        return None
    place = users_frame(error)
    where = "a step" if place is None else str(place)
    return ConfigurationError(f"model: {where}: {said}; the batch holds {forms(batch)}; {how}.")


def _how_to_mend(said: str, batch: Any) -> str | None:
    if _LABELS.search(said):
        return f"{_label_range(batch)}{_CLASSES}"
    if _INDEX.search(said):
        return "an index is not below num_embeddings of the embedding, or is negative"
    if _DEVICE.search(said):
        return "labels or indices may be out of range; trainer.accelerator: cpu says which line it was"
    if _SHAPES.search(said):
        return "change the layer that takes these inputs, or the shape that the data set gives"
    if _KINDS.search(said):
        return "convert what the data set gives, such as inputs.float() or labels.long()"
    return None


def _label_range(batch: Any) -> str:
    """Return the range of a batch's labels: of its only tensor of whole numbers."""
    whole = [tensor for _, tensor in _tensors(batch) if tensor.numel() and not tensor.is_floating_point()]
    if len(whole) != 1:
        return ""
    return f"its labels are {int(whole[0].min())} to {int(whole[0].max())}: "


def forms(batch: Any) -> str:
    """Return the shapes and kinds of the tensors in a batch.

    Example:
        >>> import torch
        >>> forms([torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)]), forms({"x": torch.zeros(2)}), forms([])
        ('(8, 3) float32, (8,) int64', 'x: (2,) float32', 'no tensor')
    """
    found = [f"{name}{tuple(tensor.shape)} {str(tensor.dtype)[6:]}" for name, tensor in _tensors(batch)]
    return ", ".join(found) or "no tensor"


def _tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from _tensors(part, f"{key}: ")
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _tensors(part, name)
