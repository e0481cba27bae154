"""Watches a step's tensor operations: none may write outside of the step, or show Python a value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.private_torch import BATCH_NORMS, ITEM, TorchDispatchMode, storage_key, tree_leaves
from fedbc_lightning.engines.recorded.recording import NotRecordableError, check_shape, written_arguments

aten = torch.ops.aten


class OnlyPure(TorchDispatchMode):
    """Lets an operation pass if it is a function of its arguments, or writes into tensors that the step has made.

    A dispatch mode stands below autograd, so it sees every operation, whoever called it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Any] = {}  # storages of these tensors, kept alive so that no other one gets their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_values(func, args)
        for tensor in _written(func, args, kwargs):
            if storage_key(tensor) not in self._made:
                raise NotRecordableError(f"{func} writes into a tensor that was there before it")
        results = func(*args, **kwargs)
        given = {storage_key(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(results):
            if storage_key(tensor) not in given:
                self._made[storage_key(tensor)] = tensor.untyped_storage()
        return results


class WithoutTensors(TorchDispatchMode):
    """Refuses operations on certain tensors, and on all tensors that share their memory.

    Args:
        tensors: Tensors that no operation may have as arguments.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._storages = {storage_key(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(storage_key(tensor) in self._storages for tensor in _tensors((args, kwargs))):
            raise NotRecordableError("it uses a parameter that it holds outside of its own modules")
        return func(*args, **kwargs)


def check_values(operation: Any, args: Any) -> None:
    """Raise if an operation, or the shape of its result, shows Python values of tensors.

    Raises:
        NotRecordableError: It does.
    """
    tags = getattr(operation, "tags", ())
    if operation is ITEM or torch.Tag.data_dependent_output in tags:
        raise NotRecordableError("it looks at the value of a tensor")
    positions = args[1] if operation is aten.index.Tensor else ()
    check_shape(operation, [position for position in positions if isinstance(position, Tensor)])


def _written(operation: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    if operation in BATCH_NORMS and (args[5] if len(args) > 5 else kwargs.get("training")):
        yield from _tensors(args[3:5])
    for value in written_arguments(operation, args, kwargs):
        yield from _tensors(value)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
