"""Manual optimization: ``training_step`` steps one or several optimizers itself (``automatic_optimization = False``).

A *local step* is one batch that ``training_step`` sees, so that ``trainer.local_steps`` and all plans remain a function
of the data; ``self.trainer.global_step`` counts optimizer steps, as in Lightning. A row is ordered by the groups of all
optimizers, one after the other, and λ, distances and the server see the whole row. Inside of a client, whenever an
optimizer steps, with or without a closure:

1. the gradients of the method's terms at the current w, such as 2 λ_i (w − z), are added to the gradients of this
   optimizer's parameters, after whatever the module has done to these, such as ``clip_gradients``, and after they were
   unscaled in 16-mixed precision, where ``manual_backward`` scales losses and a step that overflows is skipped;
2. ``on_before_optimizer_step`` is called, and the optimizer steps;
3. the method's after-step (Fed+) changes this optimizer's parameters alone;
4. ``p.grad`` is again what the module has made, so that gradients accumulate as they do without a method.

K_i is the number of all these steps, in hooks, too. For each parameter, SCAFFOLD's mean gradient is the mean over the
steps of its optimizer; where that took none, c_i stays. Methods that take steps of their own, compute losses at other
points, or need the number of steps of a single optimizer (FedNova, option II of SCAFFOLD) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.engines.client_run import ClientRun
from fedbc_lightning.engines.local_step import LocalStep
from fedbc_lightning.engines.plain_step import StepWay


class ManualStep(StepWay):
    """Takes one batch in which ``training_step`` steps its optimizers; see the module's text.

    Attributes:
        global_step: Number of optimizer steps in this client that were taken through ``self.optimizers()``.
    """

    def __init__(self, run: ClientRun, step: LocalStep) -> None:
        super().__init__(run, step)
        self._hooks, self.global_step = run.hooks, 0
        self._shown: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = []  # own gradient, the one with terms

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the steps of the client's optimizers, however they are called."""
        local, shim = self._run.optimizer, self._run.user.shim
        layout, grad = self._layout, self._bench.grad
        layout.drop_gradients()
        self.global_step, self._depth, self._is_batch = 0, 0, False
        self._losses = list[Tensor]()
        # Of each optimizer: its trained parameters, with their parts of the row of gradients, and a mask of these
        self._own: dict[Optimizer, tuple[list[tuple[nn.Parameter, Tensor]], Tensor]] = {}
        for optimizer in local.optimizers:
            held = {p for group in optimizer.param_groups for p in group["params"]}
            mask, parts = torch.zeros_like(grad, dtype=torch.bool), list[tuple[nn.Parameter, Tensor]]()
            for parameter, part, entry in zip(layout.parameters, layout.views(grad), layout.entries, strict=True):
                if parameter in held:
                    parts.append((parameter, part))
                    mask[entry.offset : entry.end] = True
            self._own[optimizer] = parts, mask
        handles = [each.register_step_post_hook(self._after) for each in local.optimizers]
        every = *local.optimizers, *local.configured.kept_optimizers
        handles += [each.register_step_pre_hook(self._before) for each in every]
        shim.take_steps_by_hand(self)
        try:
            yield
        finally:
            shim.take_steps_by_hand(None)
            for handle in handles:
                handle.remove()

    def take(self, batches: Sequence[Any], start: int, batch_idx: int) -> int:
        """Take one batch; see the base class."""
        run, batch = self._run, batches[start]
        if batch is None:
            self._hooks.call("on_train_batch_end", None, None, batch_idx)
            return self.skip(batch_idx)
        size = run.start_batch(batch, batch_idx)
        if self._hooks.call("on_train_batch_start", batch, batch_idx) == -1:
            run.is_epoch_over = True
            return 1
        self._losses, self._is_batch = [], True
        loss, output = run.training_step(batch, batch_idx)
        self._is_batch = False
        # A module that returns no loss is known by those that it gave to manual_backward.
        losses = self._losses if loss is None or loss.numel() != 1 else [loss.detach()]
        if losses:
            run.count_loss(torch.stack([each.reshape(()) for each in losses]).sum(), size)
        run.count_step(batch_idx, is_update=False)
        shown = dict(output) if isinstance(output, Mapping) else {} if loss is None else {"loss": loss}
        if isinstance(shown.get("loss"), Tensor):
            shown["loss"] = shown["loss"].detach()
        self._hooks.call("on_train_batch_end", shown, batch, batch_idx)
        return 1

    # what the module calls

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss, for ``self.manual_backward``."""
        if loss.numel() == 1:
            self._losses.append(loss.detach())
        self._bench.backward(loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Take a step of one of ``self.optimizers()``; this calls ``on_before_optimizer_step``, and counts the step."""

        def with_hooks() -> Any:
            result = self._gradient_of(optimizer, closure, self._bench.scaler)
            self._hooks.call("on_before_optimizer_step", optimizer)
            return result

        self._depth = 1  # the gradient is complete: the hook on steps has nothing to do
        try:
            if self._bench.scaler is None:
                result, is_update = optimizer.step(closure=with_hooks, **kwargs), True
            else:  # the step itself gets no closure, as in Lightning
                with_hooks()
                result, is_update = self._bench.step_scaled(optimizer, **kwargs)
        finally:
            self._depth = 0
        self._end(optimizer, is_update=is_update)
        if self._is_batch:  # Lightning counts no step that is taken in a hook
            self.global_step += 1
            self._run.user.shim.set(global_step=self._run.global_step)
        return result

    # hooks on the steps of torch

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if optimizer not in self._own:
            raise ConfigurationError(
                f"model: training steps {type(optimizer).__name__}, an optimizer that configure_optimizers does not "
                "return, so no method's terms would reach its parameters; return it, too."
            )
        self._depth += 1
        if self._depth > 1:  # a step inside of a step, such as that of a base class
            return None
        given = {"closure": args[1]} if len(args) > 1 else kwargs
        closure = given.get("closure")
        if closure is None:
            self._gradient_of(optimizer, lambda: None)
            return None
        return (args[0], *args[2:]), {**kwargs, "closure": lambda: self._gradient_of(optimizer, closure)}

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end(optimizer)

    # parts

    def _gradient_of(self, optimizer: Optimizer, closure: Callable[[], Any], scaler: Any = None) -> Any:
        """Call a closure, unscale the gradients that it leaves, and add the terms to them."""
        self._show_own()
        with torch.enable_grad():
            result = closure()
        if scaler is not None:
            scaler.unscale_(optimizer)
        (parts, mask), step = self._own[optimizer], self._step
        is_changed = step.terms or step.gradient_sum is not None or step.holds
        if is_changed and any(parameter.grad is not None for parameter, _ in parts):
            with torch.no_grad():
                for parameter, part in parts:
                    part.zero_() if parameter.grad is None else part.copy_(parameter.grad)
                if step.gradient_sum is not None:
                    own = torch.where(mask, self._bench.grad, 0.0)
                    if scaler is None or own.isfinite().all():  # the scaler skips one that overflowed
                        self._run.num_gradients = self._run.num_gradients + (mask & self._layout.moving_part())
                        step.gradient_sum[0] += own
                step.add(is_summed=False)
            resting = {self._layout.parameters[index] for index in self._layout.resting()} if step.terms else set()
            for parameter, part in parts:
                before = parameter.grad
                # A term has a gradient also where the loss has none, but not where a parameter is frozen.
                if parameter not in resting and (before is not None or step.terms):
                    has_graph = before is not None and before.requires_grad
                    parameter.grad = part + (before - before.detach()) if has_graph else part  # type: ignore[operator, union-attr]
                    self._shown.append((parameter, before, parameter.grad))
        return result

    def _show_own(self) -> None:
        """Show the gradients that the module has made, where nobody has dropped those with terms."""
        for parameter, before, with_terms in self._shown:
            if parameter.grad is with_terms:
                parameter.grad = before
        self._shown.clear()

    def _end(self, optimizer: Optimizer, *, is_update: bool = True) -> None:
        """Do what comes after a step of an optimizer: to its own parameters alone."""
        self._show_own()
        if self._step.changes_after:
            part = self._own[optimizer][1] & self._layout.moving_part()
            self._step.end(partial(self._step_sizes, optimizer), is_update=is_update, part=part)
        self._run.num_updates += is_update

    def _step_sizes(self, optimizer: Optimizer) -> Tensor:
        """Return the learning rates of an optimizer by parameter, (1, d): one may be in the groups of others, too."""
        rates = {p: float(group.get("lr", 0.0)) for group in optimizer.param_groups for p in group["params"]}
        sizes = torch.zeros_like(self._bench.grad, dtype=self._layout.master_dtype)
        for parameter, part in zip(self._layout.parameters, self._layout.views(sizes), strict=True):
            part.fill_(rates.get(parameter, 0.0))
        return sizes[None, : self._layout.num_parameters]
