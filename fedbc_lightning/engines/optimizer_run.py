"""Default local training of one client: epochs over its batches, with steps of the user's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.core.private_torch import foreach_copy
from fedbc_lightning.engines.client_run import ClientRun
from fedbc_lightning.engines.step_function import StepOutput
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.local import AfterStep, Term
from fedbc_lightning.module.collector import batch_size_of
from fedbc_lightning.state.cohort import Cohort


class MissingGradientError(Exception):
    """A step left a parameter of the optimizer without a gradient.

    torch's optimizers leave such a parameter alone. As part of a flat slice, momentum and weight decay would move it.
    """


class OptimizerRun(ClientRun):
    """Runs the loop over epochs, batches and optimizer steps, and adds the method's terms to every step's gradient.

    Args:
        bench: The workbench.
        cohort: The cohort that the client belongs to.
        k: The client's place in the cohort.
        local: The local training of this client in this round.
        terms: The terms of this client, which are added to every step's gradient.
        after_step: Change that is applied to w after every optimizer step, or None.
        keep_mean: Whether to record the mean raw gradient.
    """

    def __init__(
        self,
        bench: Workbench,
        cohort: Cohort,
        k: int,
        local: LocalTraining,
        terms: Sequence[Term],
        after_step: AfterStep | None,
        keep_mean: bool,
    ) -> None:
        super().__init__(bench, cohort, k, local)
        # A term that is zero everywhere must not give a gradient to a parameter that has none.
        self.terms = [term for term in terms if not term.is_zero]
        self.after_step = after_step
        self._replayed: StepOutput | None = None  # the last step, if it was replayed
        self._is_visited = False
        self.num_gradients = 0  # more than steps if an optimizer calls its closure several times
        self.gradient_sum = torch.zeros_like(bench.grad, dtype=bench.layout.master_dtype) if keep_mean else None

    def run(self, start: Tensor, lr_scale: float, purpose: str, *, is_last: bool) -> OptimizerRun:
        """Train the client from a model (d + b,) and return this object."""
        self._start_scaler()
        self.begin(start, lr_scale, purpose, informs_module=not self.bench.runs_only_training_step)
        epoch = 0
        while not self._is_done(epoch):
            self._run_epoch(epoch)
            epoch += 1
        self.finish(is_last)
        return self

    def finish(self, is_last: bool) -> None:
        """Keep the mean gradient and the scale, too, and show callbacks the gradients of the last step."""
        super().finish(is_last)
        if self._replayed is not None:
            self.layout.show_gradients(self._replayed.gradients)
        if self.gradient_sum is not None:
            self.gradient_mean = self.gradient_sum / max(self.num_gradients, 1)
        if self.bench.scaler is not None:
            self.record["grad_scale"] = self.bench.scaler.get_scale()

    def _is_done(self, epoch: int) -> bool:
        if self.user.shim.is_client_stopped:
            return True
        return epoch >= (self.local.epochs or 1) if self.local.steps is None else self.num_steps >= self.local.steps

    def _run_epoch(self, epoch: int) -> None:
        self.start_epoch(epoch)
        steps_before = self.num_steps
        if self.bench.takes_plain_steps:
            self._run_plain_batches()
        else:
            self._run_batches()
        self.batches_passed += self.collector.num_batches
        if self.local.steps is not None and self.num_steps == steps_before and not self.user.shim.is_client_stopped:
            raise ConfigurationError(
                f"model: a whole epoch of client {self.client} made no optimizer step (training_step returned None, or "
                "a hook skipped it), so trainer.local_steps would never be reached."
            )
        self.end_epoch()

    def _run_batches(self) -> None:
        for batch_idx, raw in enumerate(self.loader):
            batch = self.user.to_device(raw)
            stop = self._run_batch(batch, batch_idx)
            is_enough = self.local.steps is not None and self.num_steps >= self.local.steps
            if stop or is_enough or self.user.shim.is_client_stopped:
                break

    def _run_plain_batches(self) -> None:
        """Take the steps of an epoch in which no code of the user's runs but ``training_step``.

        :meth:`_run_batch` gives the same numbers, and calls everything that may happen within a step. This loop leaves
        that out, because for small models it costs more than the arithmetic.
        """
        bench, user, optimizer, recorder = self.bench, self.user, self.optimizer, self.bench.recorder
        layout, grad, terms, collector, shim = self.layout, bench.grad, self.terms, self.collector, user.shim
        batch_size, num_samples = self.loader.batch_size, self.loader.num_samples
        if self.epoch == 0:
            self._is_visited = self._has_visitors()
            recorder.start(bench.round, has_visitors=self._is_visited)
        step = optimizer.plain_step()
        clips = bool(self.local.gradient_clip_val)
        if layout.num_optimized < layout.num_parameters:
            grad[layout.num_optimized :].zero_()
        for batch_idx, raw in enumerate(self.loader):
            batch = user.to_device(raw)
            size = batch_size_of(batch, min(batch_size, num_samples - batch_idx * batch_size))
            collector.start_batch(batch, size)
            with torch.no_grad():
                self._replayed = replayed = recorder.step("single", layout.parameters, batch)
                loss: Tensor | None
                if replayed is not None:
                    loss = replayed.loss
                    foreach_copy(bench.grad_views, list(replayed.gradients))
                    for call in replayed.logged:
                        collector.log(call.name, call.value, reduce_fx=call.reduce_fx, batch_size=call.batch_size)
                    if self._is_visited:
                        layout.show_gradients(replayed.gradients)
                else:
                    if not self.is_module_informed:
                        self.inform_module()
                    is_compared = recorder.listen()
                    loss = self._backward_plain(batch, batch_idx)
                    if is_compared:
                        recorder.compare(None if loss is None else self._written(loss))
                if loss is not None:
                    self.losses.append(loss)
                    self.sizes.append(size)
                    if self.gradient_sum is not None:
                        self.gradient_sum += grad
                        self.num_gradients += 1
                    if terms:
                        bench.add_terms(terms)
                    if clips:
                        bench.clip()
                    step()
                    if self.after_step is not None:
                        self._apply_after_step(self.after_step)
            self.count_step(batch_idx, is_update=loss is not None)
            if batch_idx + 1 < self.num_batches and (self.num_steps == self.local.steps or shim.is_client_stopped):
                return
        optimizer.step_schedulers("epoch", self.current_epoch + 1, plateau=False)

    def _has_visitors(self) -> bool:
        """Return whether code that is not known runs between the steps, in data, transfers, terms or the optimizer."""
        parts = [*self.terms, *([] if self.after_step is None else [self.after_step]), *self.loader.code_between]
        return self.user.has_transfer_hooks or self.optimizer.has_visitors or not all(map(is_ours, parts))

    def _written(self, loss: Tensor) -> StepOutput:
        """Return the step that was just taken as written."""
        grouped = self.layout.parameters[: self.layout.num_grouped]
        return StepOutput([parameter.grad for parameter in grouped], loss, [])  # type: ignore[misc]

    @torch.enable_grad()
    def _backward_plain(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Write a batch's gradient into the gradient row, and return the loss, or None if the module returned none."""
        loss, _ = self.user.training_step(batch, batch_idx)
        for parameter in self.layout.parameters:
            parameter.grad = None
        if loss is None:
            return None
        loss.backward()
        if not self.layout.gather_gradients(self.bench.optimized_grad):
            raise MissingGradientError
        return loss.detach() if loss.ndim == 0 else loss.detach().reshape(())

    def _apply_after_step(self, after_step: AfterStep) -> None:
        self.bench.update_row(lambda w: after_step.apply(w, self.bench.step_sizes(self.optimizer.rates)))

    def _run_batch(self, batch: Any, batch_idx: int) -> bool:
        """Process one batch, with the optimizer step if it completes one; return whether a hook ends the epoch."""
        size = batch_size_of(
            batch, min(self.loader.batch_size, self.loader.num_samples - batch_idx * self.loader.batch_size)
        )
        self.collector.start_batch(batch, size)
        if self.hooks.call("on_train_batch_start", batch, batch_idx) == -1:
            self.optimizer.step_schedulers("epoch", self.current_epoch + 1, plateau=False)
            self.batches_passed += self.num_batches - self.collector.num_batches  # the epoch counts as complete
            return True
        self.output: dict[str, Any] = {}
        self._is_counted = False
        shows_output = self.hooks.listens("on_train_batch_end")
        accumulate = self.local.accumulate_grad_batches
        is_first = batch_idx % accumulate == 0
        is_last = (batch_idx + 1) % accumulate == 0 or batch_idx + 1 == self.num_batches

        def forward_backward() -> Tensor | None:
            with torch.enable_grad():  # an optimizer may call its closure under no_grad
                loss, output = self.user.training_step(batch, batch_idx)
                if is_first:
                    self._zero_grad(batch_idx)
                if loss is not None:
                    if not self._is_counted:  # an optimizer may call its closure several times
                        self._is_counted = True
                        self.losses.append(loss.detach().reshape(()))
                        self.sizes.append(size)
                    scaled = loss / accumulate if accumulate > 1 else loss
                    if shows_output:
                        self.output = {**(output if isinstance(output, Mapping) else {}), "loss": scaled.detach()}
                    self._backward(scaled)
            return loss

        if is_last:
            self._step(batch_idx, forward_backward)
        else:
            forward_backward()
        if batch_idx + 1 == self.num_batches:
            self.optimizer.step_schedulers("epoch", self.current_epoch + 1, plateau=False)
        if shows_output:
            self.hooks.call("on_train_batch_end", self.output, batch, batch_idx)
        return False

    def _zero_grad(self, batch_idx: int) -> None:
        self.hooks.call("on_before_zero_grad", self.optimizer.optimizer)
        if self.bench.overridden["optimizer_zero_grad"]:
            self.module.optimizer_zero_grad(self.current_epoch, batch_idx, self.optimizer.optimizer)
            return
        for parameter in self.layout.parameters:
            parameter.grad = None

    def _backward(self, loss: Tensor) -> None:
        self.hooks.call("on_before_backward", loss)
        if self.bench.scaler is not None:
            loss = self.bench.scaler.scale(loss)
        if self.bench.overridden["backward"]:
            self.module.backward(loss)
        else:
            loss.backward()
        self.hooks.call("on_after_backward")

    def _step(self, batch_idx: int, forward_backward: Callable[[], Tensor | None]) -> None:
        """Take one optimizer step: backward, terms, hooks, clipping, step; in a closure if the optimizer wants one."""
        optimizer = self.optimizer.optimizer

        def closure() -> Tensor | None:
            loss = forward_backward()
            # A batch without a loss may complete a step whose earlier batches have left a gradient.
            self.is_update = loss is not None or self.layout.has_gradient()
            if self.is_update:
                self._prepare_gradient()
            else:
                self.optimizer.show_gradient(False)
            return None if loss is None else loss.detach()  # as Lightning's closure does; LBFGS calls float() on it

        if self.bench.overridden["optimizer_step"]:
            self.module.optimizer_step(self.current_epoch, batch_idx, optimizer, closure)
        elif self.optimizer.needs_closure:
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            if self.bench.scaler is None:
                optimizer.step()
            elif self.is_update:
                self._step_scaled(self.bench.scaler)
        if self.is_update and self.after_step is not None:
            self._apply_after_step(self.after_step)
        self.count_step(batch_idx, is_update=self.is_update)

    def _prepare_gradient(self) -> None:
        """Gather the gradient into its row, unscale it, add the terms, let hooks see it, clip it."""
        bench, layout, grad = self.bench, self.layout, self.bench.grad
        if layout.num_optimized < layout.num_parameters:
            grad[layout.num_optimized :].zero_()
        missing: list[int] = []
        if not self.optimizer.is_flat:
            missing = layout.collect_gradients(grad)
        elif not layout.gather_gradients(grad[: layout.num_optimized]):
            raise MissingGradientError
        self.optimizer.show_gradient()
        if bench.scaler is not None:
            self._expose(missing)
            bench.scaler.unscale_(self.optimizer.optimizer)
        if self.gradient_sum is not None and (bench.scaler is None or bool(torch.isfinite(grad).all())):
            self.gradient_sum += grad
            self.num_gradients += 1
        if self.terms:
            bench.add_terms(self.terms)
            missing = []
        if bench.shows_gradients or not self.optimizer.is_flat:
            self._expose(missing)
        if self.hooks.listens("on_before_optimizer_step"):
            self.hooks.call("on_before_optimizer_step", self.optimizer.optimizer)
            layout.collect_gradients(grad)
        if bench.overridden["configure_gradient_clipping"]:
            self._clip_by_module()
        else:
            bench.clip()

    def _expose(self, missing: list[int]) -> None:
        self.layout.expose_gradients(self.bench.grad)
        for index in missing:
            self.layout.parameters[index].grad = None

    def _clip_by_module(self) -> None:
        """Call the user's ``configure_gradient_clipping``, which may call ``self.clip_gradients``."""

        def clip_gradients(optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            if gradient_clip_val is None:
                gradient_clip_val = self.local.gradient_clip_val
            by_value = (gradient_clip_algorithm or self.local.gradient_clip_algorithm) == "value"
            if gradient_clip_val:
                parameters = self.layout.parameters[: self.layout.num_grouped]
                clip = torch.nn.utils.clip_grad_value_ if by_value else torch.nn.utils.clip_grad_norm_
                clip(parameters, gradient_clip_val)

        self.module.__dict__["clip_gradients"] = clip_gradients
        try:
            self.module.configure_gradient_clipping(
                self.optimizer.optimizer, self.local.gradient_clip_val, self.local.gradient_clip_algorithm
            )
        finally:
            del self.module.__dict__["clip_gradients"]
        self.layout.collect_gradients(self.bench.grad)

    # mixed precision

    def _step_scaled(self, scaler: Any) -> None:
        """Take a step through the gradient scaler, which skips it and lowers its scale if the gradient overflowed."""
        before = scaler.get_scale()
        scaler.step(self.optimizer.optimizer)
        scaler.update()
        self.is_update = scaler.get_scale() >= before

    def _start_scaler(self) -> None:
        """Start with the server's gradient scale, so that no client depends on who was trained before it."""
        scaler = self.bench.scaler
        if scaler is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": self.bench.grad_scale, "_growth_tracker": 0})
