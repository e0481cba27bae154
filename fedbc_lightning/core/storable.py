"""Values that a checkpoint may hold: those that ``torch.load(weights_only=True)`` reads without running code."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor


def plain_copy(value: Any, *, is_snapshot: bool = False) -> Any:
    """Copy nested dicts, lists and tuples, with NumPy's scalars replaced by Python's numbers.

    ``torch.load(weights_only=True)`` refuses NumPy's scalars.

    Args:
        value: Value that user code contributes to a checkpoint.
        is_snapshot: Whether tensors are copied, too, so that later changes in place do not reach the copy.

    Returns:
        The copy; values that are neither containers nor NumPy's scalars are the same objects as in ``value``.

    Example:
        >>> plain_copy({"best": np.float64(0.5), "rounds": [np.int64(3), "x"]})
        {'best': 0.5, 'rounds': [3, 'x']}
    """
    # A best value of NumPy in a callback's state would make the whole checkpoint unreadable without running code.
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        items = ((plain_copy(key), plain_copy(item, is_snapshot=is_snapshot)) for key, item in value.items())
        copied = type(value)(items)
        if isinstance(value, OrderedDict):
            vars(copied).update(vars(value))  # the versions that a module's state_dict carries
        return copied
    if type(value) in (list, tuple):
        return type(value)(plain_copy(item, is_snapshot=is_snapshot) for item in value)
    return value.detach().to("cpu", copy=True) if is_snapshot and isinstance(value, Tensor) else value


def find_unreadable(value: Any, place: str = "") -> str | None:
    """Describe the first value that ``torch.load(weights_only=True)`` would refuse, or return None if there is none.

    Args:
        value: Value to examine; dicts, lists and tuples are searched.
        place: Path to ``value`` in the outer container, with which the description begins.

    Returns:
        The path to the refused value in the nested containers, and its class.

    Example:
        >>> find_unreadable({"callbacks": {"Best": {"seen": [1, slice(2)]}}})
        "['callbacks']['Best']['seen'][1] is a builtins.slice"
    """
    with suppress(Exception):  # pickle raises TypeError, AttributeError, RecursionError and others
        if not isinstance(value, Tensor):
            file = io.BytesIO()
            torch.save(value, file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        return None
    is_list = isinstance(value, (list, tuple))
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if is_list else ()
    inside = (find_unreadable(item, f"{place}[{key!r}]") for key, item in items)
    kind = type(value)
    # If all that it holds can be read, the container itself cannot, such as a dict of the user's own class.
    return next(filter(None, inside), f"{place} is a {kind.__module__}.{kind.__qualname__}")
