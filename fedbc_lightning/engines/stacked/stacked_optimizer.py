"""Runs the user's optimizer on the rows of many clients at once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from fedbc_lightning.module.client_optimizers import FlatSGD, choose_loop, initial_state
from fedbc_lightning.module.schedulers import Configured
from fedbc_lightning.state.layout import ParameterLayout


class StackedOptimizer:
    """Holds one elementwise optimizer, whose parameters are the columns of each group in a matrix of K rows.

    A group whose parameters are in part kept by the clients has two: its shared and its kept columns.

    An elementwise optimizer treats every element alike, so its step on (K, d) is the step of K clients. All K clients
    have taken the same number of steps so far, which Adam's bias correction relies on.

    Args:
        configured: What a call of the user's ``configure_optimizers`` returned.
        layout: The layout of the parameters.
    """

    def __init__(self, configured: Configured, layout: ParameterLayout) -> None:
        self._optimizer, self._parts = configured.optimizer, layout.group_parts
        self._fresh = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        self._step = torch.no_grad()(inspect.unwrap(type(self._optimizer).step))
        self._leaves: list[tuple[nn.Parameter, Tensor]] = []
        self._take_step: Callable[[], Any]
        self._num_rows = 0

    def start(self, w: Tensor, grad: Tensor, learning_rates: Sequence[float] | None, lr_scale: float) -> None:
        """Start anew on the rows of ``w`` (K, d), whose gradients will stand in ``grad`` (K, d)."""
        self._optimizer.state.clear()
        self._leaves = []
        for k, (group, parts) in enumerate(zip(self._optimizer.param_groups, self._parts, strict=True)):
            group.update(copy.deepcopy(self._fresh[k]))
            if learning_rates is not None:
                group["lr"] = learning_rates[k]
            if lr_scale != 1:
                group["lr"] = group["lr"] * lr_scale
            group["params"] = [nn.Parameter(w[:, part]) for part in parts]
            choose_loop(group)
            self._leaves += [(leaf, grad[:, part]) for leaf, part in zip(group["params"], parts, strict=True)]
        self._optimizer.state.update(initial_state(self._optimizer))
        self._cut(len(w))

    @property
    def settings(self) -> tuple[type, list[dict[str, object]]]:
        """The optimizer's class, and the settings that the user gave each group."""
        return type(self._optimizer), self._fresh

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group.get("lr", 0.0)) for group in self._optimizer.param_groups]

    def step(self, num_rows: int) -> None:
        """Take one step of the first rows, without autograd; the clients of the other rows have finished."""
        if num_rows != self._num_rows:
            self._cut(num_rows)
        self._take_step()

    def _cut(self, num_rows: int) -> None:
        """Leave the first rows alone in the optimizer."""
        self._num_rows = num_rows
        rows = [(leaf, grad[:num_rows]) for leaf, grad in self._leaves]
        for leaf, grad in rows:
            if len(leaf) != num_rows:
                self._keep(leaf, num_rows)
            leaf.grad = grad
        self._take_step = partial(self._step, self._optimizer)
        if type(self._optimizer) is SGD and len(rows) == len(
            self._parts
        ):  # 6 us on the row of one client, where torch's own step takes 10
            self._take_step = FlatSGD(self._optimizer, rows, self._take_step).step

    def _keep(self, leaf: nn.Parameter, num_rows: int) -> None:
        state = self._optimizer.state[leaf]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[name] = value[:num_rows]
        leaf.grad = None
        leaf.data = leaf.data[:num_rows]
