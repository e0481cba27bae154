"""Lists what the proof knows to be a function of its arguments; everything else is refused.

Operations of torch may be on it although they can write into tensors or look at their values: both are seen by
:class:`~fedbc_lightning.engines.recorded.proof.operations.OnlyPure`, under which the proof evaluates a step.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import math
import operator
import sys
import types
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedbc_lightning.core import private_torch

aten = torch.ops.aten

NOT_OPERATIONS = frozenset({
    "backward", "data", "from_file", "grad", "is_leaf", "output_nr", "record_stream", "rename_",
    "requires_grad_", "retain_grad", "retains_grad", "set_", "set_data", "resize_", "resize_as_", "seed", "manual_seed",
    "is_pinned", "is_inference", "is_coalesced", "is_set_to", "detach_", "tensor_split", "is_conj",
    "is_neg", "resolve_conj", "names", "refine_names", "align_to", "to_dense", "storage",
    "as_strided", "as_strided_", "storage_offset", *private_torch.VIEW_FLAGS,
})  # fmt: skip
"""Names that torch's operators share with what changes a tensor where no dispatcher sees it, or reads such things."""

TENSOR_PROPERTIES = frozenset({
    "H", "T", "mH", "mT", "device", "dtype", "imag", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_nested",
    "is_quantized", "is_sparse", "is_xpu", "itemsize", "layout", "nbytes", "ndim", "real", "requires_grad", "shape",
    "is_mkldnn", "is_xla",
})  # fmt: skip
TENSOR_METHODS = frozenset({
    "bfloat16", "bool", "byte", "char", "dim", "double", "element_size", "float", "half", "int", "is_complex",
    "is_contiguous", "is_floating_point", "is_signed", "long", "ndimension", "nelement", "numel", "short",
    "size", "split", "stride", "type_as", "unflatten", "norm", "stft", "istft", "unique",
    "unique_consecutive",
})  # fmt: skip
"""Methods of a tensor that are not themselves operators, but come down to operators, or tell its form."""

PLAIN_FUNCTIONS: list[Any] = [
    abs, all, any, bool, complex, dict, divmod, enumerate, float, format, frozenset, int, list, max, min, pow, range,
    reversed, round, set, slice, sorted, str, sum, tuple, zip, bytes, chr, ord, bin, hex, repr, ascii,
    torch.Size, torch.device, torch.finfo, torch.iinfo,
    torch.is_grad_enabled, torch.get_default_dtype, torch.is_tensor, torch.jit.is_scripting, torch.jit.is_tracing,
    torch.is_autocast_enabled, torch.compiler.is_compiling, torch.broadcast_shapes, torch.result_type,
    torch.promote_types, torch.can_cast, torch.typename, private_torch.log_api_usage,
]  # fmt: skip
EXCEPTIONS = (
    ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, LookupError, NotImplementedError,
    RuntimeError, TypeError, ValueError, Exception, StopIteration, ZeroDivisionError, OverflowError,
)  # fmt: skip
CONTEXTS = (torch.no_grad, torch.enable_grad, torch.autocast, contextlib.nullcontext)
"""Context managers that put back on leaving what they have changed on entering."""

_DICTS: tuple[dict[str, int], ...] = ({}, OrderedDict())
VIEWS: tuple[type, ...] = tuple(type(view) for some in _DICTS for view in (some.items(), some.keys(), some.values()))
"""The exact types of what ``dict.items()`` and the like give."""
METACLASSES = (type, type(nn.Parameter), type(Tensor))
"""Metaclasses whose ``isinstance`` runs nobody else's code; ABCMeta's keeps a cache only."""


def _functions_of(*places: Any) -> dict[int, Any]:
    """Return the functions of torch that these modules hold under some name, by their identities."""
    kinds = types.FunctionType, types.BuiltinFunctionType
    found = [value for place in places for name, value in vars(place).items() if not name.startswith("__")]
    return {id(f): f for f in found if isinstance(f, kinds) and _is_of_torch(f)}


def _home(function: Any) -> str:
    """Return the module in which a function was written, whatever its ``__module__`` says."""
    names = getattr(function, "__globals__", None)
    return str(names["__name__"] if names is not None else function.__module__)


def _is_of_torch(function: Any) -> bool:
    """Return whether a function was written in torch."""
    return _home(function).partition(".")[0] == "torch"


def _operations() -> dict[int, Any]:
    """Return the builtin functions of ``torch`` that are operators according to their names, by their identities."""
    found = {}
    for name, value in vars(torch).items():
        is_builtin = isinstance(value, types.BuiltinFunctionType) and getattr(value, "__self__", None) is None
        is_operation = name in ("tensor", "as_tensor", "asarray", "from_numpy") or hasattr(aten, name)
        if is_builtin and is_operation and name not in NOT_OPERATIONS:
            found[id(value)] = value
    return found


OPERATORS = (
    "abs", "add", "and_", "concat", "eq", "floordiv", "ge", "getitem", "gt", "index", "inv", "invert", "le", "lshift",
    "lt", "matmul", "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "truth", "xor",
)  # fmt: skip
"""Functions of :mod:`operator` that change nothing."""
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
TORCH = {
    **_operations(),
    **_functions_of(functional, torch.functional, torch.linalg, torch.special, torch.fft),
    **_functions_of(*private_torch.C_FUNCTIONS),
}
PURE = {
    **{id(f): f for f in PLAIN_FUNCTIONS},
    **{id(f): f for f in vars(math).values() if isinstance(f, types.BuiltinFunctionType)},
    **{id(f): f for f in (getattr(operator, name) for name in OPERATORS)},
    **TORCH,
}
"""id -> function, which is kept alive by being here."""


DUNDERS = frozenset({
    "__add__", "__sub__", "__mul__", "__truediv__", "__div__", "__floordiv__", "__mod__", "__pow__", "__matmul__",
    "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__radd__", "__rsub__", "__rmul__", "__rtruediv__",
    "__rpow__", "__rmatmul__", "__neg__", "__pos__", "__abs__", "__invert__", "__getitem__", "__setitem__", "__eq__",
    "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__len__",
})  # fmt: skip


def is_tensor_method(name: str) -> bool:
    """Return whether a method of a tensor is an operator, or returns the form of the tensor."""
    if name.startswith("_"):
        return name in DUNDERS
    return name in TENSOR_METHODS or (name not in NOT_OPERATIONS and hasattr(aten, name))


DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)


def is_layer(kind: type) -> bool:
    """Return whether a class is one of torch's own layers, whose ``forward`` keeps state in buffers only."""
    home = sys.modules.get(kind.__module__)
    functions = [value for base in kind.__mro__[:-2] for value in vars(base).values()]
    getters = [value.fget if isinstance(value, property) else value for value in functions]
    is_own = all(_is_of_torch(f) for f in getters if isinstance(f, types.FunctionType))
    is_own &= not any(hasattr(type(f), "__set__") and not isinstance(f, (property, *DESCRIPTORS)) for f in functions)
    return is_own and kind.__module__.startswith("torch.nn.modules.") and getattr(home, kind.__name__, None) is kind


ARRAY_FUNCTIONS = {id(f): f for f in vars(np).values() if type(f) is np.ufunc}
"""NumPy's own elementwise functions."""
TEXT_FUNCTIONS = (str, repr, ascii, format, bytes)
"""They write down values, a tensor's, too, where no dispatcher sees that they are looked at."""
FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""They read tensors in the sequences that they are given where no dispatcher sees it."""
HOMES = (vars(functional), vars(nn.Module), vars(Tensor))
"""Where a program that patches torch puts its own functions."""


def patches() -> list[tuple[Any, Any]]:
    """Return what stands in these places, so that two lists are equal if nothing was replaced in between."""
    return [tuple(home.values()) for home in HOMES]


def is_torch_whole() -> bool:
    """Return whether the functions in these places are torch's own, and none was replaced.

    A function that a package adds to ``nn.Module`` under a name of its own, as transformers does, replaces nothing:
    code that calls it is looked through as all other code is.
    """
    foreign = [
        (home, name)
        for home in HOMES
        for name, value in home.items()
        if isinstance(value, types.FunctionType) and not _is_of_torch(value)
    ]
    return all(home == vars(nn.Module) and _is_new_to_modules(name) for home, name in foreign)


def _is_new_to_modules(name: str) -> bool:
    """Return whether torch's ``nn.Module`` defines no such name, and Python asks for none such by itself."""
    own = _names_of_modules()
    return own is not None and name not in own and not (name.startswith("__") and name.endswith("__"))


@functools.cache
def _names_of_modules() -> frozenset[str] | None:
    """Return the names that torch's source gives the class ``nn.Module``, or None if the source is not there."""
    try:
        (body,) = ast.parse(inspect.getsource(nn.Module)).body
    except OSError:
        return None
    stored = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    return frozenset(stored | {node.name for node in ast.walk(body) if isinstance(node, ast.FunctionDef)})
