"""Evaluates loss and gradient of the user's training_step at any point."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.engines.step_function import collecting
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.collector import MetricCollector
from fedbc_lightning.module.mistakes import refuse_loss


class Oracle:
    """Evaluates the user's ``training_step`` on one batch at a point w (K, d), K = 1, under Fabric's precision.

    What the step logs is dropped unless it is asked for. The floating-point buffers are left as the user's layers move
    them.

    Args:
        bench: The workbench; it then holds w.
        calls_hooks: Whether the hooks around backward are called.

    Attributes:
        has_loss: Whether the last evaluation returned a loss, not None.
    """

    def __init__(self, bench: Workbench, *, calls_hooks: bool = True) -> None:
        self.bench, self.user, self.layout = bench, bench.user, bench.layout
        self._calls_hooks = calls_hooks
        self.has_loss = False

    def loss(self, w: Tensor, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss at w, a scalar in the master dtype; it is 0 if ``training_step`` returns None."""
        self._go_to(w)
        with torch.no_grad(), collecting(self.user, MetricCollector()):
            loss, _ = self.user.training_step(batch, batch_idx)
        return self._scalar(loss)

    def loss_and_gradient(
        self, w: Tensor, batch: Any, batch_idx: int, *, is_logged: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and the gradient (1, d) at w; the gradient is 0 for parameters without one."""
        self._go_to(w)
        for parameter in self.layout.parameters:
            parameter.grad = None
        with torch.enable_grad(), nullcontext() if is_logged else collecting(self.user, MetricCollector()):
            loss, _ = self.user.training_step(batch, batch_idx)
            if loss is not None:
                self._backward(loss, batch)
        gradient = torch.zeros_like(self.bench.grad)
        self.layout.collect_gradients(gradient)
        return self._scalar(loss), gradient.to(self.layout.master_dtype)[None]

    def _backward(self, loss: Tensor, batch: Any) -> None:
        hooks = self.user.hooks
        if self._calls_hooks:
            hooks.call("on_before_backward", loss)
        try:
            self.user.module.backward(loss) if self.bench.overridden["backward"] else loss.backward()
        except RuntimeError:
            refuse_loss(loss, self.user.module)
            raise
        if self._calls_hooks:
            hooks.call("on_after_backward")

    def _go_to(self, w: Tensor) -> None:
        # A solver's iterate is a copy in the master dtype, which half precision rounds here.
        if w.data_ptr() != self.bench.row.data_ptr():
            self.bench.row.copy_(w[0])

    def _scalar(self, loss: Tensor | None) -> Tensor:
        self.has_loss = loss is not None
        # A batch without a loss counts as loss 0 in sums, as Lightning's loop skips it; `has_loss` tells them apart.
        zero = torch.zeros((), dtype=self.layout.master_dtype, device=self.bench.row.device)
        return zero if loss is None else loss.detach().reshape(()).to(zero)
