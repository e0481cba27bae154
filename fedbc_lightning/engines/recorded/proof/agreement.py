"""Decides whether the steps of two modules are the same function: they are if both have read the same all along."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.engines.recorded.proof.reads import Reads, is_a, is_one_of, is_plain
from fedbc_lightning.engines.recorded.proof.vouched import VOUCHED

BY_TEXT = (range, slice, torch.finfo, torch.iinfo)
BY_IDENTITY = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, torch.Generator, frozenset)


def agree(mine: Reads, theirs: Reads, weights: Mapping[int, str]) -> bool:
    """Return whether two proofs have read the same; what the steps have not read has no effect on them.

    Args:
        mine: What one proof has read.
        theirs: What another proof has read.
        weights: The identities of the weights of both modules, with their names: these may have other values.
    """
    return all(_all_alike(a, b, weights) for a, b in zip(mine.found(), theirs.found(), strict=True))


def _all_alike(left: Any, right: Any, weights: Mapping[int, str]) -> bool:
    return len(left) == len(right) and all(_alike(a, b, weights) for a, b in zip(left, right, strict=True))


def _alike(a: Any, b: Any, weights: Mapping[int, str]) -> bool:
    """Return whether two values count as the same; contents of objects are compared by reads of their own."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if is_plain(a) or is_one_of(type(a), BY_TEXT):
        return repr(a) == repr(b)
    if is_a(a, Tensor):
        names = weights.get(id(a)), weights.get(id(b))
        return names[0] == names[1] and (names[0] is not None or torch.equal(a, b))
    if is_a(a, tuple):
        return _all_alike(a, b, weights)
    if is_a(a, types.FunctionType):
        return a.__code__ is b.__code__ and VOUCHED not in vars(a)
    if is_a(a, types.MethodType):
        return _alike(a.__func__, b.__func__, weights)
    if type(a) is functools.partial:
        parts = [(p.func, p.args, tuple(p.keywords.items())) for p in (a, b)]
        return _all_alike(parts[0], parts[1], weights)
    return not is_a(a, BY_IDENTITY)
