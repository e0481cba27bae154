"""Values that a checkpoint may hold: those that ``torch.load`` reads without running code, as it does by default.

Checkpoints are never loaded with an explicit ``weights_only``: so a user can allow a class to be read
(``torch.serialization.add_safe_globals``), or everything (``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1``).
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def plain_copy(value: Any, *, is_snapshot: bool = False) -> Any:
    """Copy nested containers, with values that ``torch.load(weights_only=True)`` refuses replaced by plain ones.

    NumPy's numbers become numbers and its arrays tensors, enums their values, paths strings, and namespaces and other
    mappings dicts.

    Args:
        value: Value that user code contributes to a checkpoint.
        is_snapshot: Whether tensors are copied, too, so that later changes in place do not reach the copy.

    Returns:
        The copy; other values than these are the same objects as in ``value``.

    Example:
        >>> plain_copy({"best": np.float64(0.5), "rounds": [np.int64(3), Namespace(data=PurePath("x"))]})
        {'best': 0.5, 'rounds': [3, {'data': 'x'}]}
    """
    # A best value of NumPy in a callback's state would make the whole checkpoint unreadable without running code.
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    if isinstance(value, (Enum, PurePath)):
        return str(value) if isinstance(value, PurePath) else plain_copy(value.value)
    if isinstance(value, (Namespace, SimpleNamespace)):
        value = vars(value)
    if isinstance(value, Mapping) and not isinstance(value, (OrderedDict, Counter)):
        value = dict(value)
    if type(value) in (dict, OrderedDict):
        items = ((plain_copy(key), plain_copy(item, is_snapshot=is_snapshot)) for key, item in value.items())
        copied = type(value)(items)
        if isinstance(value, OrderedDict):
            vars(copied).update(vars(value))  # the versions that a module's state_dict carries
        return copied
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return (list if isinstance(value, list) else tuple)(plain_copy(item, is_snapshot=is_snapshot) for item in value)
    return value.detach().to("cpu", copy=True) if is_snapshot and isinstance(value, Tensor) else value


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the entries with plain values: numbers, strings, None, and lists, tuples and dicts of these."""

    def is_plain(value: Any) -> bool:
        if type(value) is dict:
            return all(map(is_plain, [*value, *value.values()]))
        if type(value) in (list, tuple):
            return all(map(is_plain, value))
        return value is None or type(value) in (bool, int, float, str) or isinstance(value, np.generic)

    return {name: plain_copy(value) for name, value in values.items() if is_plain(value)}


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
            torch.load(io.BytesIO(file.getvalue()))
        return None
    is_list = isinstance(value, (list, tuple))
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if is_list else ()
    inside = (find_unreadable(item, f"{place}[{key!r}]") for key, item in items)
    kind = type(value)
    # If all that it holds can be read, the container itself cannot, such as a dict of the user's own class.
    return next(filter(None, inside), f"{place} is a {kind.__module__}.{kind.__qualname__}")
