"""A step as Lightning's loop takes it: with hooks, closures, accumulated gradients and scaled losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.engines.client_run import ClientRun
from fedbc_lightning.engines.local_step import LocalStep
from fedbc_lightning.engines.plain_step import MissingGradientError, StepWay


class HookedStep(StepWay):
    """Takes the batches and steps of one client where somebody's code may run inside of them."""

    def __init__(self, run: ClientRun, step: LocalStep) -> None:
        super().__init__(run, step)
        self._local, self._optimizer, self._hooks = run.local, run.optimizer, run.hooks
        self._is_update = False  # whether the last step moved w
        self._rates: tuple[float, ...] = ()  # learning rates of the last step, which the module may change behind it
        self._part: Tensor | bool = True  # what the last step moved, for methods that ask for it
        self._with_graph: dict[int, Tensor] = {}  # gradients of backward(create_graph=True), by their parameter's place

    def take(self, batches: Sequence[Any], start: int, batch_idx: int) -> int:
        """Take one batch with hooks around it; see the base class."""
        run, hooks, accumulate, batch = self._run, self._hooks, self._local.accumulate_grad_batches, batches[start]
        is_end = batch_idx + 1 == run.num_batches
        if batch is None:
            self.skip(batch_idx)
            for parameter in self._layout.parameters:
                # In Lightning, too, the next loss adds to what the last step left; the row cannot add to itself.
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            if is_end:
                run.step_schedulers()
            hooks.call("on_train_batch_end", None, None, batch_idx)
            return 1
        size = run.start_batch(batch, batch_idx)
        if hooks.call("on_train_batch_start", batch, batch_idx) == -1:
            run.optimizer.step_schedulers("step", batch_idx + 1, plateau=False)  # as if a step had been made
            run.step_schedulers()
            run.is_epoch_over = True  # and counts as complete
            return 1
        shown: dict[str, Any] = {}
        is_counted = False

        def forward_backward() -> Tensor | None:
            nonlocal is_counted, shown
            with torch.enable_grad():  # an optimizer may call its closure under no_grad
                loss, output = run.training_step(batch, batch_idx)
                if batch_idx % accumulate == 0:
                    self._zero_grad(run.current_epoch, batch_idx)
                if loss is None:
                    return None
                scaled = loss / accumulate if accumulate > 1 else loss
                shown = {**(output if isinstance(output, Mapping) else {}), "loss": scaled.detach()}
                self._bench.backward(scaled)
                if not is_counted:  # an optimizer may call its closure several times
                    is_counted = True
                    run.count_loss(loss, size)
            return scaled

        if (batch_idx + 1) % accumulate == 0 or is_end:
            self._take_step(batch_idx, forward_backward)
            run.check_steps()
            run.count_step(batch_idx, is_update=self._is_update, rates=self._rates, part=self._part)
        else:
            forward_backward()
        if is_end:
            run.step_schedulers()
        hooks.call("on_train_batch_end", shown, batch, batch_idx)
        return 1

    # parts

    def _zero_grad(self, epoch: int, batch_idx: int) -> None:
        """Drop the gradients of the last step."""
        self._hooks.call("on_before_zero_grad", self._optimizer.optimizer)
        if self._bench.overridden["optimizer_zero_grad"]:
            self._bench.user.module.optimizer_zero_grad(epoch, batch_idx, self._optimizer.optimizer)
            return
        self._layout.drop_gradients()

    def _take_step(self, batch_idx: int, forward_backward: Callable[[], Tensor | None]) -> None:
        """Take one step; as in Lightning, the loss and its gradient are computed inside the closure of the step.

        Args:
            batch_idx: Number of the batch in its epoch.
            forward_backward: Computes the gradients, and returns the loss, or None if the module returns none.
        """
        module, optimizer = self._run.module, self._optimizer.optimizer

        def closure() -> Tensor | None:
            loss = forward_backward()
            if loss is None and type(optimizer) is torch.optim.LBFGS and not self._bench.overridden["optimizer_step"]:
                raise ConfigurationError("model: training_step returned None, but LBFGS needs a loss; return one of 0.")
            # A batch without a loss may complete a step whose earlier batches have left a gradient.
            self._is_update = loss is not None or self._layout.has_gradient()
            if self._is_update:
                self._prepare_gradient()
            else:
                self._optimizer.show_gradient(False)
                self._hooks.call("on_before_optimizer_step", self._optimizer.optimizer)
            self._rates = self._optimizer.rates
            return None if loss is None else loss.detach()  # as Lightning's closure does; LBFGS calls float() on it

        self._rates = self._optimizer.rates
        if self._bench.overridden["optimizer_step"]:
            module.optimizer_step(self._run.current_epoch, batch_idx, optimizer, closure)
        elif self._bench.scaler is None:
            optimizer.step(closure=closure)  # type: ignore[arg-type]
        else:
            closure()
            if self._is_update:
                _, self._is_update = self._bench.step_scaled(optimizer)
        self._step.end(partial(self._bench.step_sizes, self._rates), is_update=self._is_update, part=self._part)

    def _prepare_gradient(self) -> None:
        """Gather the gradient into its row, unscale it, add the terms, let hooks see it, clip it."""
        bench, layout, grad = self._bench, self._layout, self._bench.grad
        missing: list[int] = []
        with torch.no_grad():
            grad[layout.num_optimized :].zero_()
            if not self._optimizer.is_flat:
                found = enumerate(parameter.grad for parameter in layout.parameters[: layout.num_grouped])
                self._with_graph = {k: each for k, each in found if each is not None and each.requires_grad}
                missing = layout.collect_gradients(grad)
            elif not layout.gather_gradients(grad[: layout.num_optimized]):
                raise MissingGradientError
            is_asked = self._step.gradient_sum is not None or self._step.changes_after or bench.kept_to
            self._part = layout.moving_part() if is_asked else True
            resting = layout.resting() if self._step.terms else []
        self._optimizer.show_gradient()
        if bench.scaler is not None:
            self._expose(missing)
            bench.scaler.unscale_(self._optimizer.optimizer)
        # A gradient that overflowed is skipped by the scaler; in SCAFFOLD's c_i one infinity would stay for good.
        is_summed = bench.scaler is None or self._step.gradient_sum is None or bool(torch.isfinite(grad).all())
        self._run.num_gradients = self._run.num_gradients + is_summed * self._part
        self._step.add(is_summed=is_summed)
        # A term gives a gradient to every parameter that is not frozen, also to those that the loss does not reach.
        if self._step.terms:
            missing = [index for index in missing if index in resting]
            for index in resting:
                grad[layout.entries[index].offset : layout.entries[index].end].zero_()
        if bench.shows_gradients or not self._optimizer.is_flat:
            self._expose(missing)
        if self._hooks.listens("on_before_optimizer_step"):
            self._hooks.call("on_before_optimizer_step", self._optimizer.optimizer)
            with torch.no_grad():
                layout.collect_gradients(grad)
        if bench.overridden["configure_gradient_clipping"]:
            self._clip_by_module()
        else:
            self._step.clip()
        if self._with_graph:
            self._expose(missing)

    def _expose(self, missing: list[int]) -> None:
        parameters = self._layout.parameters
        self._layout.expose_gradients(self._bench.grad)
        for index in missing:
            parameters[index].grad = None
        for index, gradient in self._with_graph.items():  # the row's values, through which one may differentiate again
            parameters[index].grad = parameters[index].grad + (gradient - gradient.detach())  # type: ignore[operator]

    def _clip_by_module(self) -> None:
        """Call the user's ``configure_gradient_clipping``, which may call ``self.clip_gradients``."""
        local, module = self._local, self._bench.user.module

        def clip_gradients(optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            if gradient_clip_val is None:
                gradient_clip_val = local.gradient_clip_val
            by_value = (gradient_clip_algorithm or local.gradient_clip_algorithm) == "value"
            if gradient_clip_val:
                parameters = self._layout.parameters[: self._layout.num_grouped]
                clip = torch.nn.utils.clip_grad_value_ if by_value else torch.nn.utils.clip_grad_norm_
                clip(parameters, gradient_clip_val)

        module.__dict__["clip_gradients"] = clip_gradients
        try:
            module.configure_gradient_clipping(
                self._optimizer.optimizer, local.gradient_clip_val, local.gradient_clip_algorithm
            )
        finally:
            del module.__dict__["clip_gradients"]
        with torch.no_grad():
            self._layout.collect_gradients(self._bench.grad)
