"""The training of one client: its start, its epochs and its result, and by default steps of the user's optimizer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.private_torch import run_backward
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.data.loading import ClientLoader
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.contrasted_step import ContrastedStep
from fedbc_lightning.engines.hooked_step import HookedStep, MissingGradientError
from fedbc_lightning.engines.local_step import LocalStep
from fedbc_lightning.engines.recorded.replay import Replay
from fedbc_lightning.engines.step_function import StepOutput
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.local import AfterStep, ModelContrast, Term
from fedbc_lightning.local.engine import Trains
from fedbc_lightning.module.collector import batch_size_of
from fedbc_lightning.module.mistakes import locate_step, place_in_run, refuse_loss
from fedbc_lightning.state.cohort import Cohort, Taken


class ClientRun(ABC):
    """One client's local training, with Lightning's hooks in Lightning's order.

    Args:
        bench: The workbench.
        cohort: The cohort that the client belongs to.
        k: The client's place in the cohort.
        local: The local training of this client in this round.

    Attributes:
        w: Iterate (d,) after training, in the master dtype; :meth:`finish` sets it and what follows.
        kept: Kept parameters (p,) after training, in the master dtype.
        buffers: The floating-point buffers (b,) at the end of training; ``counters`` are the integer buffers.
        num_updates: K_i, the number of steps that moved w; not those without a gradient, or that the scaler skipped.
        mean_rates: Mean learning rate of each parameter group over these steps.
        loss: Mean loss over the client's batches; NaN if no batch had a loss.
        gradient_mean: The mean (d,) of the raw gradients, or None if it was not asked for.
        is_finite: Whether all losses were finite.
        taken: The epochs and steps of this and earlier rounds, at which local schedules continue.
        record: What the client counted and logged, for its row in ``clients.csv``.
        is_module_informed: Whether the module was put into training mode and told which client it trains.
    """

    def __init__(self, bench: Workbench, cohort: Cohort, k: int, local: LocalTraining) -> None:
        self.bench, self.cohort, self.local = bench, cohort, local
        self.user, self.layout, self.optimizer = bench.user, bench.layout, bench.optimizer
        self.module, self.hooks = bench.user.module, bench.user.hooks
        self.client, self._k = cohort.ids[k], k
        self.num_steps = self.num_updates = 0
        self.losses: list[Tensor] = []  # of the batches that have a loss; `sizes` are their sizes
        self.sizes: list[int] = []
        self._updates_by_rate: Counter[tuple[float, ...]] = Counter()  # learning rate of each group -> updates
        self.before = Taken() if cohort.taken_before is None else cohort.taken_before[k]
        self.epoch = self.first_epoch = 0  # the epoch counts within the round, the first one over all rounds
        self.batches_passed = 0
        self.is_module_informed = False
        self._metrics: dict[str, Tensor] = {}  # what the module logged in the last epoch
        self.gradient_mean: Tensor | None = None

    def run(self, start: Tensor, lr_scale: float, purpose: str, *, is_last: bool) -> ClientRun:
        """Train the client from a model (d + b,) and return this object.

        Args:
            start: The model.
            lr_scale: Factor on the user's learning rates.
            purpose: Name that seeds the random draws of this training.
            is_last: Whether no other training of the client follows in this round.
        """
        try:
            self.train(start, lr_scale, purpose)
            self.finish(is_last)
        except Exception as error:
            self.tell(error)
            raise
        return self

    @abstractmethod
    def train(self, start: Tensor, lr_scale: float, purpose: str) -> None:
        """Take all of the client's steps; see :meth:`run` for the arguments."""

    def tell(self, error: Exception, batch_idx: int | None = None, batch: Any = None) -> None:
        """Note on an exception at which client, round and batch it came up.

        Args:
            error: The exception.
            batch_idx: Number of the batch in its epoch; None outside of batches.
            batch: The batch, or None if it could not be made.
        """
        place = place_in_run(f"client {self.client}", self.bench.round)
        locate_step(error, place if batch_idx is None else f"{place}, batch {batch_idx}", batch)

    def begin(self, start: Tensor, lr_scale: float, purpose: str, *, informs_module: bool = True) -> None:
        """Seed the generators, load the start model, and make loader and optimizer as new.

        Args:
            start: The model (d + b,).
            lr_scale: Factor on the user's learning rates.
            purpose: Name that seeds the random draws of this training.
            informs_module: Whether to call :meth:`inform_module` at once; otherwise it is called here only if the
                user's code has a part in making the batches.
        """
        bench, cohort = self.bench, self.cohort
        seed_globals(derive(bench.seed, purpose, bench.round, self.client), self.user.device)
        buffers, kept = [None if rows is None else rows[self._k] for rows in (cohort.start_buffers, cohort.start_kept)]
        bench.load(start, cohort.start_counters, buffers, kept=kept)
        self.loader = bench.train_loader(self.client)
        self.num_batches = len(self.loader)
        bench.work.begin([self.client], self.local.num_steps(self.num_batches))
        self.first_epoch = self.before.whole_epochs(self.num_batches)
        self.user.shim.start_client()
        self.collector = self.user.start_collecting()
        if informs_module or not self.loader.gathers_plainly:
            self.inform_module()
        self.optimizer.reset(lr_scale, epochs=self.first_epoch, steps=self.before.steps)
        if self.client not in self.cohort.started:
            self.cohort.started.add(self.client)
            self.hooks.call("on_client_start", self.client)

    def inform_module(self) -> None:
        """Put the module into training mode, and let ``self.trainer`` show it which client it trains.

        This must happen before any code of the user's module runs. A client whose steps are all replayed runs no such
        code, and is trained without it.
        """
        self.is_module_informed = True
        self.user.train_mode()
        self.user.shim.set(
            **self._whole_training().limits(self.num_batches),
            num_training_batches=self.num_batches,
            train_dataloader=self.loader,
            current_epoch=self.current_epoch,
            global_step=self.global_step,
            current_client=self.client,
            callback_metrics=self._metrics,
            training=True,
        )

    def _whole_training(self) -> LocalTraining:
        """Return the client's training in a full round: one round as a straggler does not shorten its schedules."""
        if self.cohort.taken_before is None:
            return self.local
        return max(self.bench.local, self.local, key=lambda local: local.num_steps(self.num_batches))

    @property
    def current_epoch(self) -> int:
        """Number of the epoch that the module sees in ``self.trainer``."""
        return self.first_epoch + self.epoch

    @property
    def global_step(self) -> int:
        """Number of steps that the module sees in ``self.trainer``."""
        return self.before.steps + self.num_steps

    # epochs

    def start_epoch(self, epoch: int) -> None:
        """Prepare for the batches of an epoch."""
        self.epoch = epoch
        self.loader.set_epoch(epoch)
        if self.is_module_informed:
            self.user.shim.set(current_epoch=self.current_epoch)
            self.hooks.call("on_train_epoch_start")

    def end_epoch(self) -> None:
        """Call what belongs after the last batch of an epoch."""
        if self.is_module_informed:
            self.hooks.call("on_train_epoch_end")
        self._metrics = self.collector.current()
        if self.is_module_informed:
            self.user.shim.set(callback_metrics=self._metrics)
            self.optimizer.step_schedulers("epoch", self.current_epoch + 1, plateau=True)
            self.layout.check_trainable()
        self.collector.end_epoch()

    def count_step(self, batch_idx: int, *, is_update: bool = True, num_steps: int = 1) -> None:
        """Count an optimizer step that was made, with its learning rates, and step the schedulers of steps.

        Args:
            batch_idx: Number of the batch.
            is_update: Whether the step moved w.
            num_steps: Number of steps that were made up to this batch; without schedulers it may be more than 1.
        """
        if is_update:
            self.num_updates += num_steps
            self._updates_by_rate[self.optimizer.rates] += num_steps
        self.num_steps += num_steps
        self.bench.work.num_steps += num_steps
        if self.is_module_informed:
            self.user.shim.set(global_step=self.global_step)
        if self.optimizer.schedulers:
            self.optimizer.step_schedulers("step", batch_idx + 1, plateau=False)
            self.optimizer.step_schedulers("step", batch_idx + 1, plateau=True)

    def size_of(self, batch: Any, batch_idx: int) -> int:
        """Return the number of samples of a batch; what its tensors do not tell follows from its place in the epoch."""
        size = self.loader.batch_size
        return batch_size_of(batch, min(size, self.loader.num_samples - batch_idx * size))

    def count_loss(self, loss: Tensor, size: int) -> None:
        """Keep the loss of a batch of so many samples; it is read from the device at the end."""
        self.losses.append(loss.detach().reshape(()))
        self.sizes.append(size)

    # the end

    def finish(self, is_last: bool) -> None:
        """Keep what local training ended with, and what it counted and logged."""
        if is_last:
            self.hooks.call("on_client_end", self.client)
        # A single client may hand out the workbench's own row: nothing is loaded into it before the cohort was read.
        is_kept = is_last and len(self.cohort) == 1
        num_shared, master_dtype = self.layout.num_parameters, self.layout.master_dtype
        shared = self.bench.row[:num_shared] if self.layout.num_kept else self.bench.row
        self.w = shared.to(master_dtype, copy=not is_kept)
        self.kept = self.bench.row[num_shared:].to(master_dtype, copy=True) if self.layout.num_kept else self.w[:0]
        self.buffers, self.counters = self.layout.read_buffers(), self.layout.read_counters()
        self.mean_rates = self._rates_on_average()
        logged = self.collector.result()
        losses = read(self.losses)
        self.loss, self.is_finite = math.nan, all(map(math.isfinite, losses))
        if losses:
            self.loss = sum(losses) / len(losses)
            total = sum(loss * size for loss, size in zip(losses, self.sizes, strict=True))
            logged = {"loss": total / sum(self.sizes), **logged}
        else:
            logged.pop("loss", None)  # it trained nothing: `check_records` refuses a round of such clients
        self.taken = self.before.plus(self.batches_passed, self.num_steps, self.num_batches)
        self.record = {"num_steps": self.num_steps, **{f"train_{name}": value for name, value in logged.items()}}

    def _rates_on_average(self) -> tuple[float, ...]:
        if not self.num_updates:
            return (0.0,) * len(self.layout.group_slices)
        if len(self._updates_by_rate) == 1:
            return next(iter(self._updates_by_rate))
        weighted = [[rate * count for rate in rates] for rates, count in self._updates_by_rate.items()]
        return tuple(sum(group) / self.num_updates for group in zip(*weighted, strict=True))


class OptimizerRun(ClientRun):
    """Trains a client in epochs over its batches by steps of the user's own optimizer.

    A step is taken from its recording if there is one (:class:`Replay`), as the module writes it
    (:meth:`_take_written`), or with Lightning's hooks inside (:class:`HookedStep`). What happens to its gradient then
    is :class:`LocalStep`.

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
        self, bench: Workbench, cohort: Cohort, k: int, local: LocalTraining, terms: Sequence[Term],
        after_step: AfterStep | None, keep_mean: bool, trains: Trains = "all", contrast: ModelContrast | None = None,
    ) -> None:  # fmt: skip
        super().__init__(bench, cohort, k, local)
        self.step = LocalStep(
            self.layout, local, bench.row[None], bench.grad[None], terms, after_step, trains, keep_mean
        )
        self._hooked = HookedStep(bench, local, self.step)
        self._contrast = contrast if contrast is not None and contrast.weight else None
        self._is_plain = bench.takes_plain_steps and self._contrast is None
        self._gradients: Sequence[Tensor] | None = None  # of the last step, if it was replayed
        self._num_gradients = 0

    def train(self, start: Tensor, lr_scale: float, purpose: str) -> None:
        """Run the epochs; see the base class."""
        self._hooked.start_scaler()
        self.begin(start, lr_scale, purpose, informs_module=not self.bench.runs_only_training_step)
        self._training_step = self.user.training_step
        if self._contrast is not None:
            self._training_step = ContrastedStep(self.bench, self._contrast).training_step
        optimizer = self.optimizer
        self.step.start(lambda active: optimizer.plain_step(), lambda: self.bench.step_sizes(optimizer.rates))
        self._recorded = Replay(self.bench, self.collector, self.step)
        epoch = 0
        while not self._is_done(epoch):
            self._run_epoch(epoch)
            epoch += 1

    def finish(self, is_last: bool) -> None:
        """Keep the mean gradient and the scale, too, and show callbacks the gradients of the last step."""
        super().finish(is_last)
        if self._gradients is not None and self._k == len(self.cohort) - 1:  # no hook looks between clients of a cohort
            self.layout.show_gradients(self._gradients)
        if self.step.gradient_sum is not None:
            count = max(self._num_gradients + self._hooked.num_gradients, 1)
            self.gradient_mean = self.step.gradient_sum[0, : self.layout.num_parameters] / count
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
        # Parameters outside of all groups have no gradient but that of the method's terms. Zeroed once per epoch, their
        # part of the row sums the terms over the epoch; it moves no weight, but is part of SCAFFOLD's mean gradient.
        if self.layout.num_optimized < len(self.bench.grad):
            self.bench.grad[self.layout.num_optimized :].zero_()
        recorder = self.bench.recorder
        may_replay = self._is_plain and recorder.reason is None and not self.optimizer.has_step_hooks
        batches: Sequence[Any] = ()
        start = batch_idx = 0
        steps_before = self.num_steps
        try:
            for batches in self._stretches():
                start = 0
                while start < len(batches):
                    count, is_over = (self._replay(batches[start:], batch_idx) if may_replay else 0), False
                    if not count:
                        count, is_over = 1, self._take_batch(batches[start], batch_idx)
                    start, batch_idx = start + count, batch_idx + count
                    is_enough = self.local.steps is not None and self.num_steps >= self.local.steps
                    if is_over or is_enough or self.user.shim.is_client_stopped:
                        if self._is_plain and batch_idx >= self.num_batches:
                            self._step_schedulers()
                        return
        except Exception as error:
            self.tell(error, batch_idx, batches[start] if start < len(batches) else None)
            raise
        finally:
            recorder.count_written(self.num_steps - steps_before)
        if self._is_plain:  # a loader of the user's may have given fewer batches than it says, or more
            self._step_schedulers()

    def _stretches(self) -> Iterator[Sequence[Any]]:
        """Yield the batches of an epoch on the device, in lists of one form between which nobody's code runs."""
        is_known = type(self.loader) is ClientLoader and not self.user.has_transfer_hooks
        for batches in self.loader.stretches() if is_known else ([batch] for batch in self.loader):
            yield list(map(self.user.to_device, batches))

    def _step_schedulers(self) -> None:
        """Step the schedulers of interval ``epoch``, at the end of one."""
        self.optimizer.step_schedulers("epoch", self.current_epoch + 1, plateau=False)

    # the ways to take a step

    def _replay(self, batches: Sequence[Any], batch_idx: int) -> int:
        """Replay steps on the first of these batches, and return their number; 0 if the next one must be written."""
        with torch.no_grad():
            recording = self.bench.recorder.ready("single", self.layout.parameters, batches[0])
        if recording is None:
            return 0
        # A scheduler's code runs between the steps, so it finds each of them counted and logged.
        count = 1 if self.optimizer.schedulers else min(recording.credit, len(batches))
        if self.local.steps is not None:
            count = min(count, self.local.steps - self.num_steps)
        size = self.size_of(batches[0], batch_idx)
        with torch.no_grad():  # but not around the schedulers below, whose code may use autograd
            losses, self._gradients = self._recorded.take(recording, batches[:count], size)
        self.losses += losses
        self.sizes += [size] * count
        self._num_gradients += count
        self.count_step(batch_idx + count - 1, num_steps=count)
        return count

    def _take_batch(self, batch: Any, batch_idx: int) -> bool:
        """Process one batch as it is written, with the optimizer step if it completes one.

        Returns:
            Whether a hook ends the epoch.
        """
        check()
        if not self.is_module_informed:
            self.inform_module()
        self._gradients = None
        size = self.size_of(batch, batch_idx)
        self.collector.start_batch(batch, size)
        if not self._is_plain:
            return self._take_hooked(batch, batch_idx, size)
        self._take_written(batch, batch_idx, size)
        return False

    def _take_written(self, batch: Any, batch_idx: int, size: int) -> None:
        """Take a step in which nobody's code but ``training_step`` runs; compare it with its replay if it is time."""
        layout, recorder = self.layout, self.bench.recorder
        is_compared = recorder.listen()
        loss, _ = self._training_step(batch, batch_idx)
        # Only now, as in Lightning's loop: training_step may look at the gradients of the last step.
        for parameter in layout.parameters:
            parameter.grad = None
        if loss is not None:
            try:
                self.count_loss(loss, size)
                run_backward(loss)
            except RuntimeError:
                refuse_loss(loss, self.module)
                raise
            if not layout.gather_gradients(self.bench.optimized_grad):
                raise MissingGradientError
        if is_compared:  # before schedulers log more, or read what was logged
            grouped = layout.parameters[: layout.num_grouped]
            gradients: list[Any] = [parameter.grad for parameter in grouped]
            recorder.compare(None if loss is None else StepOutput(gradients, self.losses[-1], []))
        if loss is not None:
            self._num_gradients += 1
            self.optimizer.show_gradient()  # the step may have called self.optimizers().zero_grad()
            with torch.no_grad():
                self.step.take()
        self.count_step(batch_idx, is_update=loss is not None)

    def _take_hooked(self, batch: Any, batch_idx: int, size: int) -> bool:
        """Take a batch with hooks around it, and return whether one of them ends the epoch."""
        hooks, hooked = self.hooks, self._hooked
        if hooks.call("on_train_batch_start", batch, batch_idx) == -1:
            self._step_schedulers()
            self.batches_passed += self.num_batches - self.collector.num_batches  # the epoch counts as complete
            return True
        shown: dict[str, Any] = {}
        is_counted = False
        accumulate = self.local.accumulate_grad_batches

        def forward_backward() -> Tensor | None:
            nonlocal is_counted, shown
            with torch.enable_grad():  # an optimizer may call its closure under no_grad
                loss, output = self._training_step(batch, batch_idx)
                if batch_idx % accumulate == 0:
                    hooked.zero_grad(self.current_epoch, batch_idx)
                if loss is None:
                    return None
                try:
                    if not is_counted:  # an optimizer may call its closure several times
                        is_counted = True
                        self.count_loss(loss, size)
                    scaled = loss / accumulate if accumulate > 1 else loss
                    shown = {**(output if isinstance(output, Mapping) else {}), "loss": scaled.detach()}
                    hooked.backward(scaled)
                except RuntimeError:
                    refuse_loss(loss, self.module)
                    raise
            return loss

        if (batch_idx + 1) % accumulate == 0 or batch_idx + 1 == self.num_batches:
            hooked.take(self.current_epoch, batch_idx, forward_backward)
            self.count_step(batch_idx, is_update=hooked.is_update)
        else:
            forward_backward()
        if batch_idx + 1 == self.num_batches:
            self._step_schedulers()
        hooks.call("on_train_batch_end", shown, batch, batch_idx)
        return False
