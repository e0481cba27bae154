"""The private parts of torch that the package uses, and of torchmetrics; no other file names one.

Each text says in which versions the part was read and what happens without it. ``pyproject.toml`` allows no version
that is newer than these, and ``tests/core/test_private.py`` fails if a part is gone or means something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.autograd.graph import get_gradient_edge
from torch.distributed import Store
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

__all__ = ["OpOverload", "TorchDispatchMode", "tree_map_only"]
"""Names of modules that torch calls private: operators, modes that see every operation, and walks over nested values.

Read in torch 2.8 and 2.15. Without them no step can be recorded: the recorded engine has to go.
"""

aten = torch.ops.aten
_engine = torch.autograd.Variable._execution_engine

# Modules

BatchNorm = _BatchNorm
"""Base class of all BatchNorm layers, also of those that are derived from none of the three with a number.

Read in torch 2.8 and 2.15. Without it, name BatchNorm1d, 2d, 3d and SyncBatchNorm: layers of other packages are missed.
"""

CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module under which hooks are registered.

Read in torch 2.8 and 2.15. Without them a hook could not be noticed, which a recorded step would never call: refuse to
record.
"""

FLAT_WEIGHTS = "_flat_weight"
"""Beginning of the attributes in which recurrent layers keep lists of their weights.

Read in torch 2.8 and 2.15. Without such attributes nothing happens: those of that name are only not looked at.
"""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's own parameters, to put back what ``functional_call`` replaced.

    Read in torch 2.8 and 2.15. Without it, use ``setattr``, which checks and registers each tensor in each step.
    """
    return module._parameters


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether a module's own buffer belongs to its ``state_dict``.

    Read in torch 2.8 and 2.15. Without it, look for the name in ``state_dict``, which modules may change.
    """
    return name not in module._non_persistent_buffers_set


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers, also those that are None so far, which ``named_buffers`` leaves out.

    Read in torch 2.8 and 2.15. Without it, a buffer that a step makes of None is not noticed, and passes to the next
    client.
    """
    return module._buffers


def renew_flat_weights(layer: nn.RNNBase) -> None:
    """Let a recurrent layer's list of weights hold those that it has now, for ``functional_call`` leaves others there.

    Read in torch 2.8 and 2.15. Without it, the layer does not need this.
    """
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]


def is_hooked(parameter: nn.Parameter) -> bool:
    """Return whether hooks are registered on a parameter, or may be on the node that accumulates its gradient.

    torch does not tell the hooks of that node, but makes it anew unless somebody keeps it, as hooks on it need: then it
    knows what was written on it.

    Read in torch 2.8 and 2.15. Without it, such hooks cannot be noticed: refuse to record steps.
    """
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return True
    if not parameter.requires_grad:
        return False
    node: Any = get_gradient_edge(parameter).node
    node.metadata["met"] = True
    del node
    return "met" in cast(Any, get_gradient_edge(parameter).node.metadata)


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors to which ``loss.backward()`` would give gradients.

    Read in torch 2.8 and 2.15. Without it, a recorded step gives no gradient to a leaf that is no parameter.
    """
    found, seen, stack = list[Tensor](), set[Any](), [loss.grad_fn]
    while stack:
        node: Any = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            stack += [before for before, _ in node.next_functions]
    return found


def inside_compiled(model: Any) -> nn.Module | None:
    """Return the module inside ``torch.compile(module)``, or None if the model is not compiled.

    Read in torch 2.8 and 2.15; ``torch.compile`` imports the module that is looked for. Without it, ask users to
    compile inside of their module.
    """
    dynamo = sys.modules.get("torch._dynamo")
    return model._orig_mod if dynamo is not None and isinstance(model, dynamo.OptimizedModule) else None


# Tensors


def writes_into(tensor: Tensor) -> int:
    """Return how often a tensor was written into, not counting writes through ``.data``.

    Read in torch 2.8 and 2.15. Without it, compare sums of the values, which takes as long as reading them.
    """
    return tensor._version


foreach_copy: Callable[[list[Tensor], tuple[Tensor, ...]], Any] = torch._foreach_copy_
"""Copies tensors into others in one call.

Read in torch 2.8 and 2.15. Without it, use ``copy_`` of each tensor, one call for each.
"""


def run_backward(loss: Tensor) -> None:
    """Do what ``loss.backward()`` does, without the checks around it, which take 8 us in each step.

    Read in torch 2.8 and 2.15. Without it, call ``loss.backward()``.
    """
    if type(loss) is Tensor and loss.numel() == 1 and loss.is_floating_point():
        one = torch.ones_like(loss)
        _engine.run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        loss.backward()


def listens_to_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether step hooks are registered on an optimizer, or on all optimizers.

    Read in torch 2.8 and 2.15. Without it, always call ``optimizer.step`` with what torch wraps around it.
    """
    return bool(
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    )  # fmt: skip


def count_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers take it that an optimizer has stepped, for they warn of one that never did.

    Read in torch 2.8 and 2.15. Without it, schedulers warn in methods that take steps of their own.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


# Operations

UNSAFE_VIEW = aten._unsafe_view.default
"""Operation that ``reshape`` after a product comes down to.

Read in torch 2.8 and 2.15. Without it, a recorded step has one operation more.
"""


def schema(operation: OpOverload) -> Any:
    """Return an operator's schema: its name, arguments with aliases, results, and whether it writes.

    Read in torch 2.8 and 2.15. Without it, it cannot be known what an operation writes into: record nothing.
    """
    return operation._schema


def kernel(operation: OpOverload) -> Callable[..., Any]:
    """Return what an operator calls, without the Python function around it, because it is called in every step.

    Read in torch 2.8 and 2.15. Without it, call the operator itself.
    """
    return operation._op


def trace(function: Callable[..., Any], inputs: Any) -> fx.GraphModule:
    """Write down the operations of a function on tensors without values; its own constants keep theirs.

    Read in torch 2.8 and 2.15, which call the tracer experimental. Without it no step can be recorded.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # A process whose first backward pass comes after a trace has threads of autograd's, and cannot be forked any more.
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


# Processes


def set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of the process group that exists.

    Read in torch 2.8, where the function is private, and in 2.15, where ``torch.distributed`` has it. Without it, give
    the timeout when the group is made: a process that never comes is then noticed after a week.
    """
    distributed: Any = torch.distributed
    set_timeout = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
    set_timeout(timeout)


def store_of_group() -> Store:
    """Return another connection to the store of the process group, since a waiting collective may hold the first one.

    Read in torch 2.8 and 2.15. Without it, open a store of their own for heartbeats.
    """
    return torch.distributed.distributed_c10d._get_default_store().clone()


# Metrics


def set_updated(metric: Metric) -> None:
    """Let a metric count as updated once, so that it computes from states that were put into it.

    Read in torchmetrics 1.4 and 1.9. Without it, a metric restored to its best value warns that it has none.
    """
    metric._update_count, metric._computed = 1, None
