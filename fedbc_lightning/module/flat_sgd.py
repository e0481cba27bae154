"""Steps of ``torch.optim.SGD`` on flat rows, without what torch does around their two or three operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


class Part(NamedTuple):
    """The part of the rows that one parameter group moves.

    Attributes:
        group: The group, as the optimizer holds it.
        leaf: The group's only parameter, under which the optimizer keeps the momentum.
        row: The same values without autograd.
        grad: Their gradients.
        space: Memory for a direction that is neither the gradient nor the momentum.
    """

    group: dict[str, Any]
    leaf: nn.Parameter
    row: Tensor
    grad: Tensor
    space: Tensor


class FlatSGD:
    """Takes the steps of ``torch.optim.SGD`` with the same bits, and leaves the same state in the optimizer.

    The operations are those of ``_single_tensor_sgd`` in torch 2.8 to 2.15, in their order. Settings are read in every
    step, because the user's code may change them.

    Args:
        optimizer: The optimizer.
        leaves: The only parameter of each group, and its gradient.
    """

    def __init__(self, optimizer: Optimizer, leaves: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        self._state = optimizer.state
        self._parts = [
            Part(group, leaf, leaf.detach(), grad, torch.empty_like(grad))
            for group, (leaf, grad) in zip(optimizer.param_groups, leaves, strict=True)
        ]

    @staticmethod
    def can_step(optimizer: Optimizer) -> bool:
        """Return whether the optimizer is one whose steps are taken here: torch's own SGD, one tensor at a time."""
        return type(optimizer) is SGD and all(
            group["foreach"] is False and not (group["fused"] or group["differentiable"])
            and not any(isinstance(value, Tensor) for value in group.values())
            for group in optimizer.param_groups
        )  # fmt: skip

    def step(self) -> None:
        """Take one step; call this without autograd."""
        for group, leaf, row, grad, space in self._parts:
            decay, momentum = group["weight_decay"], group["momentum"]
            direction = torch.neg(grad, out=space) if group["maximize"] else grad
            if decay:
                direction = torch.add(direction, row, alpha=decay, out=space)
            if momentum:
                state = self._state[leaf]
                buffer = state.get("momentum_buffer")
                if buffer is None:
                    buffer = state["momentum_buffer"] = direction.clone()
                else:
                    buffer.mul_(momentum).add_(direction, alpha=1 - group["dampening"])
                direction = torch.add(direction, buffer, alpha=momentum, out=space) if group["nesterov"] else buffer
            row.add_(direction, alpha=-group["lr"])
