"""Steps of ``torch.optim.SGD`` on flat rows, without what torch does around their two or three operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD

PLAIN = frozenset({float, int})
_settings = itemgetter("params", "foreach", "fused", "differentiable", "lr", "momentum", "dampening", "weight_decay")


class Part(NamedTuple):
    """The part of the rows that one parameter group moves.

    Attributes:
        leaf: The group's only parameter, under which the optimizer keeps the momentum.
        row: The same values without autograd.
        grad: Their gradients.
        space: Memory for a direction that is neither the gradient nor the momentum.
    """

    leaf: nn.Parameter
    row: Tensor
    grad: Tensor
    space: Tensor


class FlatSGD:
    """Takes the steps of ``torch.optim.SGD`` with the same bits, and leaves the same state in the optimizer.

    The operations are those of ``_single_tensor_sgd`` in torch 2.8 to 2.15, in their order. Groups and state are read
    from the optimizer in every step, because the user's code may change or replace them at any time.

    Args:
        optimizer: The optimizer.
        leaves: The only parameter of each group, and its gradient.
        other_step: The optimizer's own step, which is taken where the groups are not the usual ones.
    """

    def __init__(
        self, optimizer: SGD, leaves: Sequence[tuple[nn.Parameter, Tensor]], other_step: Callable[[], Any]
    ) -> None:
        self._optimizer, self._other_step = optimizer, other_step
        self._parts = [Part(leaf, leaf.detach(), grad, torch.empty_like(grad)) for leaf, grad in leaves]

    def step(self) -> None:
        """Take one step; call this without autograd."""
        groups, parts = self._optimizer.param_groups, self._parts
        if len(groups) != len(parts) or not all(map(_is_usual, groups, parts)):
            self._other_step()
            return
        for group, (leaf, row, grad, space) in zip(groups, parts, strict=True):
            decay, momentum = group["weight_decay"], group["momentum"]
            direction = torch.neg(grad, out=space) if group["maximize"] else grad
            if decay:
                direction = torch.add(direction, row, alpha=decay, out=space)
            if momentum:
                state = self._optimizer.state[leaf]
                buffer = state.get("momentum_buffer")
                if buffer is None:
                    buffer = state["momentum_buffer"] = direction.clone()
                else:
                    buffer.mul_(momentum).add_(direction, alpha=1 - group["dampening"])
                direction = torch.add(direction, buffer, alpha=momentum, out=space) if group["nesterov"] else buffer
            row.add_(direction, alpha=-group["lr"])


def _is_usual(group: dict[str, Any], part: Part) -> bool:
    """Return whether a group holds the flat parameter with its gradient, and settings that are plain numbers."""
    parameters, foreach, fused, differentiable, *numbers = _settings(group)
    return (
        len(parameters) == 1 and parameters[0] is part.leaf and part.leaf.grad is part.grad
        and foreach is False and not (fused or differentiable) and PLAIN.issuperset(map(type, numbers))
    )  # fmt: skip
