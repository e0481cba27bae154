"""The tensor operations of a function, recorded once and replayed without autograd, transforms or the module's Python.

A step of a small model is a few microseconds of arithmetic under a hundred of interpreter and autograd. torch's tracer
sees every operation below both; run one after another these are the same operations on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, fx

from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.private_torch import (
    UNSAFE_VIEW,
    OpOverload,
    TorchDispatchMode,
    kernel,
    schema,
    trace,
    tree_map_only,
)

aten = torch.ops.aten
# Operations whose result is their input if it has the same shape, strides and offset.
VIEWS = frozenset({
    aten.alias.default, aten.detach.default, aten.view.default, UNSAFE_VIEW, aten.expand.default,
    aten.reshape.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor,
})  # fmt: skip
# Operations that give back their input, strides included, if they are done twice with the same arguments.
SWAPS = frozenset({aten.t.default, aten.transpose.int})
# Operations whose values depend on shapes alone.
CONSTANTS = frozenset({
    aten.scalar_tensor.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.zeros.default, aten.ones.default, aten.full.default,
    aten.arange.default,
})  # fmt: skip
Replay = Callable[..., tuple[Tensor, ...]]


class NotRecordableError(Exception):
    """A function cannot be recorded as one list of operations; the message gives the reason."""


def record(function: Replay, inputs: Sequence[Tensor], forbidden: Sequence[Tensor] = ()) -> tuple[Replay, bool]:
    """Record what a function does to tensors of these shapes, dtypes, strides and devices.

    Nothing is computed while it is recorded: torch's fake tensors have shapes and no values. Therefore everything that
    looks at a value (``.item()``, ``.numpy()``, ``if loss > 0``) fails here instead of becoming a constant of the
    recording.

    Args:
        function: Function from tensors to a tuple of tensors; it may use autograd and ``torch.func``.
        inputs: Example inputs.
        forbidden: Tensors with gradients, which may reach the function as inputs only.

    Returns:
        The same function for inputs of this form, to be called under ``torch.no_grad``, and whether it draws random
        numbers.

    Raises:
        NotRecordableError: An operation gives shapes that depend on values, or writes into a tensor that the function
            has not made, or torch cannot trace the function.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in forbidden}
    try:
        traced = trace(function, inputs)
        for node in traced.graph.nodes:
            constant = getattr(traced, node.target) if node.op == "get_attr" else None
            if isinstance(constant, Tensor) and constant.untyped_storage().data_ptr() in storages:
                raise NotRecordableError("it uses a parameter that it holds outside of its own modules")
    except NotRecordableError:
        raise
    except Exception as error:
        raise NotRecordableError(f"it looks at values, or torch cannot trace it ({first_line(error)})") from error
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    for node in calls:
        _check(node)
        _settle_dtype(node)
    if not any(isinstance(node.target, OpOverload) and schema(node.target).is_mutable for node in calls):
        _simplify(traced, inputs[0].device)
    return _as_python(traced), any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in calls)


def _check(node: fx.Node) -> None:
    """Raise if the shape of an operation's result depends on values, or if it writes into what the function was given.

    Raises:
        NotRecordableError: One of the two.
    """
    tags = getattr(node.target, "tags", ())
    depends = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    if node.target is aten.index.Tensor:  # tagged always, but integers give a shape of their own; masks do not
        positions: Any = [item.meta["val"] for item in node.args[1] if item is not None]  # type: ignore[union-attr]
        depends = any(position.dtype in (torch.bool, torch.uint8) for position in positions)
    if depends:
        raise NotRecordableError(f"the shape of {node.target}'s result depends on values")
    if not isinstance(node.target, OpOverload):
        return
    for position, argument in enumerate(schema(node.target).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value: Any = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        written = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, fx.Node) and _root(item).op != "call_function" for item in written):
            raise NotRecordableError(f"{node.target} writes into what it was given")


def _root(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shows."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        returns = schema(node.target).returns if isinstance(node.target, OpOverload) else ()
        if not any(value.alias_info is not None for value in returns):
            break
        node = node.args[0]
    return node


def _settle_dtype(node: fx.Node) -> None:
    """Write the dtype of a new tensor into its call, because torch's default dtype may be another one in a replay."""
    if not isinstance(node.target, OpOverload) or node.all_input_nodes or not isinstance(node.meta.get("val"), Tensor):
        return
    if any(argument.name == "dtype" for argument in schema(node.target).arguments):
        node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}


def _simplify(traced: fx.GraphModule, device: torch.device) -> None:
    """Drop operations that change nothing or repeat another one, and compute constants once."""
    graph = traced.graph
    seen: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = _unchanged(node)
        key = (node.target, repr(node.args), repr(node.kwargs))
        if same is None and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            same = seen.get(key)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            continue
        seen[key] = node
    for k, node in enumerate([node for node in graph.nodes if node.target in CONSTANTS]):
        name = f"constant_{k}"
        example = node.meta["val"]
        filled = [  # the traced tensors have no values; only shapes matter for constants
            torch.empty_strided(a.meta["val"].shape, a.meta["val"].stride(), dtype=a.meta["val"].dtype, device=device)
            if isinstance(a, fx.Node) else a for a in node.args
        ]  # fmt: skip
        traced.register_buffer(name, node.target(*filled, **node.kwargs), persistent=False)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta["val"] = example
        node.replace_all_uses_with(constant)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _unchanged(node: fx.Node) -> fx.Node | None:
    """Return the input of an operation that gives it back as it is, or None for any other operation."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target in SWAPS and source.target is node.target and node.args[1:] == source.args[1:]:
        return source.args[0]  # type: ignore[return-value]
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    is_alike = (before.shape, before.stride(), before.storage_offset(), before.dtype) == (
        after.shape, after.stride(), after.storage_offset(), after.dtype,
    )  # fmt: skip
    times_one = node.target is aten.mul.Scalar and node.args[1] == 1
    return source if is_alike and (node.target in VIEWS or times_one) else None


def quickest(node: fx.Node) -> Callable[..., Any]:
    """Return the quickest callable for an operation: a function or method of torch's if it calls just this operation.

    Python calls these in two thirds of the time of an ``OpOverload`` (9 % of W1 in benchmarks). Which
    operation they call depends on their arguments, so they are tried on tensors of the meta device, which have no
    memory; that they take the same arguments shows in the first replays, which are compared with the step as written.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return target  # type: ignore[return-value]
    name = schema(target).name.removeprefix("aten::")
    for place in (torch, Tensor):
        function = getattr(place, name, None)
        if isinstance(function, (BuiltinFunctionType, MethodDescriptorType)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), _without_memory)
            try:
                with torch.no_grad(), _Calls() as calls:
                    function(*args, **kwargs)
            except Exception:  # it takes other arguments, or has no kernel for the meta device
                continue
            if calls.made == [target]:
                return function
    return kernel(target)


class _Calls(TorchDispatchMode):
    """Keeps the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(func)
        return func(*args, **(kwargs or {}))


def _without_memory(node: fx.Node) -> Any:
    def like(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return tree_map_only(Tensor, like, node.meta["val"])


def _as_python(traced: fx.GraphModule) -> Replay:
    """Return the graph as one Python function with a line per operation, which frees results after their last use.

    ``GraphModule`` does the same and takes 0.6 us more per operation.
    """
    last_use = {used: node for node in traced.graph.nodes for used in node.all_input_nodes}
    names: dict[str, Any] = {}
    parameters: list[str] = []
    lines: list[str] = []

    def written(value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, list):
            return f"[{', '.join(map(written, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(written(item) + ', ' for item in value)})"
        name = f"value_{len(names)}"
        names[name] = value
        return name

    for node in traced.graph.nodes:
        if node.op == "placeholder":
            parameters.append(node.name)
        elif node.op == "get_attr":
            names[node.name] = getattr(traced, node.target)
        elif node.op == "output":
            lines.append(f"return {written(tuple(node.args[0]))}")
        else:
            operation = written(quickest(node))
            arguments = [*map(written, node.args), *(f"{key}={written(value)}" for key, value in node.kwargs.items())]
            lines.append(f"{node.name} = {operation}({', '.join(arguments)})")
            ended = [u.name for u in node.all_input_nodes if last_use[u] is node and u.op == "call_function"]
            lines += [f"del {', '.join(ended)}"] if ended else []
    exec(f"def replay({', '.join(parameters)}):\n    " + "\n    ".join(lines), names)
    return names["replay"]
