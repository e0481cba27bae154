"""The private parts of torch that the package uses, and of torchmetrics; no other file names one.

Each text says in which versions the part was read and what happens without it. ``pyproject.toml`` allows no version
that is newer than these, and ``tests/core/test_private.py`` fails if a part is gone or means something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric

__all__ = ["DeviceContext", "OpOverload", "TorchDispatchMode", "tree_leaves", "tree_map_only"]
"""Names of modules that torch calls private: operators, modes that see every operation, and walks over nested values.

Read in torch 2.8 and 2.15. Without them no step can be recorded or proven: the recorded engine has to go.
"""

aten = torch.ops.aten

# Modules

BatchNorm = _BatchNorm
"""Base class of all BatchNorm layers, also of those that are derived from none of the three with a number.

Read in torch 2.8 and 2.15. Without it, name BatchNorm1d, 2d, 3d and SyncBatchNorm: layers of other packages are missed.
"""

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold its parameters, buffers and children, which are dicts by name.

Read in torch 2.8 and 2.15. Without them the proof of a step cannot take down what a module holds, and must refuse.
"""

CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CALL_HOOK_OPTIONS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
GLOBAL_CALL_HOOKS = tuple(f"_global{name}" for name in CALL_HOOKS)
GLOBAL_REGISTRATION_HOOKS = tuple(f"_global_{kind}_registration_hooks" for kind in ("module", "buffer", "parameter"))
STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
"""Attributes of a module, and names in ``torch.nn.modules.module``, under which hooks are registered.

Read in torch 2.8 and 2.15. Without them a hook could not be noticed, which a recorded step would never call: refuse to
record.
"""

CALL_NAMES = ("__call__", "_call_impl")
COMPILED_CALL = "_compiled_call_impl"
BACKWARD_HOOK_KIND = "_is_full_backward_hook"
NAMED_MEMBERS = nn.Module._named_members
"""What a call of a module, ``module.compile()``, a backward hook, and walks such as ``parameters()`` go through.

Read in torch 2.8 and 2.15. Without them the proof cannot tell a module with a call or a walk of its own: refuse it.
"""

FLAT_WEIGHTS = "_flat_weight"
"""Beginning of the attributes in which recurrent layers keep lists of their weights.

Read in torch 2.8 and 2.15. Without such attributes nothing happens: those of that name are only not looked at.
"""
FLAT_WEIGHT_REFERENCES = "_flat_weight_refs"
"""One of these attributes, which holds weak references. Read in torch 2.8 and 2.15; without it nothing happens."""


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


def renew_flat_weights(layer: nn.RNNBase) -> None:
    """Let a recurrent layer's list of weights hold those that it has now, for ``functional_call`` leaves others there.

    Read in torch 2.8 and 2.15. Without it, the layer does not need this.
    """
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]


def is_hooked(parameter: nn.Parameter) -> bool:
    """Return whether hooks are registered on a parameter.

    Read in torch 2.8 and 2.15. Without it, such hooks cannot be noticed: refuse to record steps.
    """
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


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


def storage_key(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others as long as its storage object lives.

    Read in torch 2.8 and 2.15; tensors without memory have one, too. Without it, use ``untyped_storage().data_ptr()``
    and refuse empty tensors.
    """
    return tensor.untyped_storage()._cdata


foreach_copy: Callable[[list[Tensor], tuple[Tensor, ...]], Any] = torch._foreach_copy_
"""Copies tensors into others in one call.

Read in torch 2.8 and 2.15. Without it, use ``copy_`` of each tensor, one call for each.
"""


def listens_to_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether step hooks are registered on an optimizer, or on all optimizers.

    Read in torch 2.8 and 2.15. Without it, always call ``optimizer.step`` with what torch wraps around it.
    """
    return bool(
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    )  # fmt: skip


# Operations

UNSAFE_VIEW, ITEM = aten._unsafe_view.default, aten._local_scalar_dense.default
"""Operations that torch's public functions come down to: ``reshape`` after a product, and ``item``.

Read in torch 2.8 and 2.15. Without the first, a recorded step has one operation more; without the second, the proof
must refuse what reads a value elsewhere.
"""

BATCH_NORMS = {
    getattr(aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index")
    if hasattr(aten, name)
}
"""Operations that write running means and variances, their 4th and 5th arguments, while their schemas deny it.

Read in torch 2.8 and 2.15. Without one, nothing has to be done: it is no longer called.
"""

VIEW_FLAGS = ("_conj", "_neg_view")
"""Names in ``torch`` of two views that differ in a flag, which no operation shows.

Read in torch 2.8 and 2.15. Without one, nothing has to be done: it cannot be called.
"""

C_FUNCTIONS = (*(getattr(torch._C, name) for name in ("_nn", "_linalg", "_special", "_fft")), torch._VF)
log_api_usage = torch._C._log_api_usage_once
"""Modules with the C functions behind ``torch.nn.functional`` and the like, and one that modules call when made.

Read in torch 2.8 and 2.15. Without one, the proof refuses steps that call its functions: they run as they are written.
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


def trace(function: Callable[..., Any], inputs: Any, decompositions: Any = None) -> fx.GraphModule:
    """Write down the operations of a function on tensors without values; its own constants keep theirs.

    Read in torch 2.8 and 2.15, which call the tracer experimental. Without it no step can be recorded.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, decompositions, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def compile_graph(function: Callable[..., Any], inputs: Any) -> Callable[[list[Tensor]], Any]:
    """Compile a function of tensors by Inductor to one call of C++, which takes a list of tensors and empties it.

    Nothing looks at the tensors of a call but for their shapes. Read in torch 2.14. Without it, or where it raises,
    steps are replayed and not compiled. ``tests/engines/test_compiled_steps.py`` tries it.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    traced = trace(function, inputs, select_decomp_table())
    values = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    with config.patch(compile_threads=1), tracing(TracingContext(values[0].fake_mode)):  # no processes of Inductor's
        return compile_fx_inner(traced, values, cpp_wrapper=True)


def repeat_while(condition: Callable[..., Tensor], body: Callable[..., Any], carried: Any, others: Any) -> Any:
    """Call ``body(*carried, *others)`` on its own results as long as the condition holds; for graphs to be compiled.

    Read in torch 2.14. Without it, compile one step instead of a loop of them.
    """
    from torch._higher_order_ops.while_loop import while_loop_op

    return while_loop_op(condition, body, carried, others)


# Modes

num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Returns the number of modes that see calls of torch's functions; a default device is one.

Read in torch 2.8 and 2.15. Without it, use the length of the list in :func:`has_listeners`.
"""


def has_listeners() -> bool:
    """Return whether anything sees all that torch computes: a mode, anomaly detection, or hooks on saved tensors.

    The mode of the default device does not count. Read in torch 2.8 and 2.15. Without it, a recorded step would leave
    such a mode out silently: record nothing.
    """
    return bool(
        any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
        or _get_current_dispatch_mode_stack()
        or torch.is_anomaly_enabled()
        or torch._C._autograd._top_saved_tensors_default_hooks(True)
    )


# Processes


def set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of the process group that exists.

    Read in torch 2.8, where the function is private, and in 2.15, where ``torch.distributed`` has it. Without it, give
    the timeout when the group is made: a process that never comes is then noticed after a week.
    """
    distributed: Any = torch.distributed
    set_timeout = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
    set_timeout(timeout)


# Metrics


def set_updated(metric: Metric) -> None:
    """Let a metric count as updated once, so that it computes from states that were put into it.

    Read in torchmetrics 1.4 and 1.9. Without it, a metric restored to its best value warns that it has none.
    """
    metric._update_count, metric._computed = 1, None
