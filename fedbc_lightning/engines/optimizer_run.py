"""Default local training of one client: epochs over its batches, with steps of the user's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.data.loading import ClientLoader
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.client_run import ClientRun
from fedbc_lightning.engines.contrasted_step import ContrastedStep
from fedbc_lightning.engines.recorded.replay import Replay
from fedbc_lightning.engines.recorded.step_recorder import Recording
from fedbc_lightning.engines.step_function import StepOutput
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.local import AfterStep, ModelContrast, Term
from fedbc_lightning.local.engine import Trains
from fedbc_lightning.module.collector import batch_size_of
from fedbc_lightning.module.mistakes import refuse_loss
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
        trains: Part of the model that is trained, see :meth:`fedbc_lightning.local.engine.Engine.solve`.
        contrast: Model-contrastive term of this client, which is added to the loss of each batch, or None.
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
        trains: Trains = "all",
        contrast: ModelContrast | None = None,
    ) -> None:
        super().__init__(bench, cohort, k, local)
        # A term that is zero everywhere must not give a gradient to a parameter that has none.
        self.terms = [term for term in terms if not term.is_zero]
        self.after_step = after_step
        self._contrast = contrast if contrast is not None and contrast.weight else None
        self._is_plain = bench.takes_plain_steps and self._contrast is None
        self._held, self._held_values = self.layout.held_part(trains), bench.row[:0]
        self._gradients: Sequence[Tensor] | None = None  # of the last step, if it was replayed
        self.num_gradients = 0  # more than steps if an optimizer calls its closure several times
        self.gradient_sum = torch.zeros_like(bench.grad, dtype=bench.layout.master_dtype) if keep_mean else None

    def train(self, start: Tensor, lr_scale: float, purpose: str) -> None:
        """Run the epochs; see the base class."""
        self._start_scaler()
        self.begin(start, lr_scale, purpose, informs_module=not self.bench.runs_only_training_step)
        self._training_step = self.user.training_step
        if self._contrast is not None:
            self._training_step = ContrastedStep(self.bench, self._contrast).training_step
        if self._held is not None:
            self._held_values = self.bench.row[self._held].clone()
        epoch = 0
        while not self._is_done(epoch):
            self._run_epoch(epoch)
            epoch += 1

    def finish(self, is_last: bool) -> None:
        """Keep the mean gradient and the scale, too, and show callbacks the gradients of the last step."""
        super().finish(is_last)
        if self._gradients is not None and self._k == len(self.cohort) - 1:  # no hook looks between clients of a cohort
            self.layout.show_gradients(self._gradients)
        if self.gradient_sum is not None:
            self.gradient_mean = self.gradient_sum[: self.layout.num_parameters] / max(self.num_gradients, 1)
        if self.bench.scaler is not None:
            self.record["grad_scale"] = self.bench.scaler.get_scale()

    def _is_done(self, epoch: int) -> bool:
        if self.user.shim.is_client_stopped:
            return True
        return epoch >= (self.local.epochs or 1) if self.local.steps is None else self.num_steps >= self.local.steps

    def _run_epoch(self, epoch: int) -> None:
        self.start_epoch(epoch)
        steps_before = self.num_steps
        self._run_batches()
        self.batches_passed += self.collector.num_batches
        if self.local.steps is not None and self.num_steps == steps_before and not self.user.shim.is_client_stopped:
            raise ConfigurationError(
                f"model: a whole epoch of client {self.client} made no optimizer step (training_step returned None, or "
                "a hook skipped it), so trainer.local_steps would never be reached."
            )
        self.end_epoch()

    def _run_batches(self) -> None:
        """Take the steps of an epoch: as many as possible are replayed, the others are taken as they are written."""
        self._changes = self._changes_of_a_step() if self._is_plain else []
        self._recorded = Replay(self.bench, self.collector, self._changes)
        may_replay = self._is_plain and not self.optimizer.has_step_hooks
        batches: Sequence[Any] = ()
        start = batch_idx = 0
        try:
            for batches in self._stretches():
                start = 0
                while start < len(batches):
                    recording = self._recording(batches[start]) if may_replay else None
                    if recording is not None:
                        chosen = batches[start : start + self._num_replays(recording)]
                        count, is_over = self._replay(recording, chosen, batch_idx), False
                    else:
                        count, is_over = 1, self._run_batch(batches[start], batch_idx)
                    start, batch_idx = start + count, batch_idx + count
                    is_enough = self.local.steps is not None and self.num_steps >= self.local.steps
                    if is_over or is_enough or self.user.shim.is_client_stopped:
                        if self._is_plain and batch_idx >= self.num_batches:
                            self._step_schedulers()
                        return
        except Exception as error:
            self.tell(error, batch_idx, batches[start] if start < len(batches) else None)
            raise
        if self._is_plain:  # a loader of the user's may have given fewer batches than it says, or more
            self._step_schedulers()

    @torch.no_grad()
    def _recording(self, batch: Any) -> Recording | None:
        return self.bench.recorder.ready("single", self.layout.parameters, batch)

    def _num_replays(self, recording: Recording) -> int:
        """Return how many steps may be replayed without any other code in between."""
        if self.optimizer.schedulers:
            return 1
        steps = self.local.steps
        return recording.credit if steps is None else min(recording.credit, steps - self.num_steps)

    def _stretches(self) -> Iterator[Sequence[Any]]:
        """Yield the batches of an epoch on the device, in lists of one form between which nobody's code runs."""
        is_known = type(self.loader) is ClientLoader and not self.user.has_transfer_hooks
        for batches in self.loader.stretches() if is_known else ([batch] for batch in self.loader):
            yield list(map(self.user.to_device, batches))

    def _replay(self, recording: Recording, batches: Sequence[Any], batch_idx: int) -> int:
        """Replay steps on batches of one form, and return their number; see :meth:`Replay.take`."""
        size = self._size_of(batches[0], batch_idx)
        rest, self._gradients = self._recorded.take(recording, batches, size)
        count = len(rest)
        self.losses += [loss for loss, *_ in rest]
        self.sizes += [size] * count
        self.num_gradients += count
        self.count_step(batch_idx + count - 1, num_steps=count)
        return count

    def _size_of(self, batch: Any, batch_idx: int) -> int:
        size = self.loader.batch_size
        return batch_size_of(batch, min(size, self.loader.num_samples - batch_idx * size))

    def _changes_of_a_step(self) -> list[Callable[[], Any]]:
        """Return what happens in a plain step after its gradient has come into the row, in order."""
        bench, layout = self.bench, self.layout
        changes: list[Callable[[], Any]] = []
        # Parameters outside of all groups have no gradient but that of the method's terms. Zeroed once per epoch, their
        # part of the row sums the terms over the epoch; it moves no weight, but is part of SCAFFOLD's mean gradient.
        bench.grad[layout.num_optimized :].zero_()
        if self.gradient_sum is not None:
            changes.append(partial(self.gradient_sum.add_, bench.grad))
        changes += bench.adders(self.terms)
        if self._held is not None:
            changes.append(bench.grad[self._held].zero_)
        if self.local.gradient_clip_val:
            changes.append(bench.clip)
        changes.append(self.optimizer.plain_step())
        if self.after_step is not None:
            changes.append(partial(self._apply_after_step, self.after_step))
        if self._held is not None:  # weight decay moves what has no gradient
            changes.append(partial(bench.row[self._held].copy_, self._held_values))
        return changes

    def _step_schedulers(self) -> None:
        """Step the schedulers of interval ``epoch``, at the end of one."""
        self.optimizer.step_schedulers("epoch", self.current_epoch + 1, plateau=False)

    def _apply_after_step(self, after_step: AfterStep) -> None:
        self.bench.update_row(lambda w: after_step.apply(w, self.bench.step_sizes(self.optimizer.rates)))

    def _run_batch(self, batch: Any, batch_idx: int) -> bool:
        """Process one batch as it is written, with the optimizer step if it completes one.

        Returns:
            Whether a hook ends the epoch.
        """
        check()
        if not self.is_module_informed:
            self.inform_module()
        self._gradients = None
        size = self._size_of(batch, batch_idx)
        self.collector.start_batch(batch, size)
        if self.hooks.call("on_train_batch_start", batch, batch_idx) == -1:
            self._step_schedulers()
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
                loss, output = self._training_step(batch, batch_idx)
                if is_first:
                    self._zero_grad(batch_idx)
                if loss is None:
                    return None
                try:
                    if not self._is_counted:  # an optimizer may call its closure several times
                        self._is_counted = True
                        self.losses.append(loss.detach().reshape(()))
                        self.sizes.append(size)
                    scaled = loss / accumulate if accumulate > 1 else loss
                    if shows_output:
                        self.output = {**(output if isinstance(output, Mapping) else {}), "loss": scaled.detach()}
                    self._backward(scaled)
                except RuntimeError:
                    refuse_loss(loss, self.module)
                    raise
            return loss

        if not is_last:
            forward_backward()
        elif self._is_plain:
            self._step_plainly(batch_idx, forward_backward)
        else:
            self._step(batch_idx, forward_backward)
        if batch_idx + 1 == self.num_batches and not self._is_plain:
            self._step_schedulers()
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

    def _step_plainly(self, batch_idx: int, forward_backward: Callable[[], Tensor | None]) -> None:
        """Take a step as it is written, which is also compared with its replay if it is the turn of that."""
        is_compared = self.bench.recorder.listen()
        loss = forward_backward()
        if loss is not None and not self.layout.gather_gradients(self.bench.optimized_grad):
            raise MissingGradientError
        if is_compared:  # before hooks of the optimizer or its schedulers log more, or read what was logged
            self.bench.recorder.compare(None if loss is None else self._written())
        if loss is not None:
            self.num_gradients += 1
            self.optimizer.show_gradient()  # the step may have called self.optimizers().zero_grad()
            with torch.no_grad():
                for change in self._changes:
                    change()
        self.count_step(batch_idx, is_update=loss is not None)

    def _written(self) -> StepOutput:
        """Return the step that was just taken as written."""
        grouped = self.layout.parameters[: self.layout.num_grouped]
        return StepOutput([parameter.grad for parameter in grouped], self.losses[-1], [])  # type: ignore[misc]

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
        if self._held is not None:
            with torch.no_grad():
                self.bench.row[self._held].copy_(self._held_values)
        self.count_step(batch_idx, is_update=self.is_update)

    def _prepare_gradient(self) -> None:
        """Gather the gradient into its row, unscale it, add the terms, let hooks see it, clip it."""
        bench, layout, grad = self.bench, self.layout, self.bench.grad
        if layout.num_optimized < len(grad):
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
        if self._held is not None:
            grad[self._held].zero_()
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
