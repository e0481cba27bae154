"""The training of a cohort's clients, one after another, and by default by steps of the user's optimizer."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.private_torch import foreach_copy, run_backward
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.data.loading import ClientLoader
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.contrasted_step import ContrastedStep
from fedbc_lightning.engines.hooked_step import HookedStep, MissingGradientError
from fedbc_lightning.engines.local_step import LocalStep, Training
from fedbc_lightning.engines.step_function import StepOutput, log_replayed
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.collector import batch_size_of
from fedbc_lightning.module.mistakes import locate_step, place_in_run, refuse_loss
from fedbc_lightning.state.cohort import Cohort, LocalResult, Taken

log = logging.getLogger("lightning.pytorch." + __name__)  # a child of Lightning's logger, whose lines are shown


class TrainedClient(NamedTuple):
    """What the training of one client gave; the names are those of :class:`~fedbc_lightning.state.cohort.LocalResult`.

    Attributes:
        rates: Mean learning rate of each parameter group over the steps that moved w.
    """

    w: Tensor
    kept: Tensor
    buffers: Tensor
    counters: Tensor
    steps: int
    losses: float
    are_losses_finite: bool
    rates: tuple[float, ...]
    taken: Taken
    records: dict[str, Any]
    gradient_mean: Tensor | None


class ClientRun(ABC):
    """Trains the clients of a cohort one after another, with Lightning's hooks in Lightning's order.

    One object trains them all: for a client of few samples, making objects costs as much as its steps.

    Args:
        bench: The workbench.
        cohort: The clients; it takes the result.
        asked: What the method asks for.

    Attributes:
        client: The client that trains.
        num_updates: K_i, the number of steps that moved w; not those without a gradient, or that the scaler skipped.
        losses: Losses of the batches that have one; ``sizes`` are the numbers of samples.
        before: Its epochs and steps in earlier rounds, at which local schedules continue.
        epoch: Number of the epoch within the round; ``first_epoch`` is that of the round's first one over all rounds.
        is_module_informed: Whether the module was put into training mode and told which client it trains.
    """

    def __init__(self, bench: Workbench, cohort: Cohort, asked: Training) -> None:
        self.bench, self.cohort, self.asked, self.local = bench, cohort, asked, asked.local
        self.user, self.layout, self.optimizer = bench.user, bench.layout, bench.optimizer
        self.module, self.hooks = bench.user.module, bench.user.hooks
        self.gradient_mean: Tensor | None = None

    def run(self) -> None:
        """Train all clients, and hand the cohort the result."""
        trained = []
        try:
            for k in range(len(self.cohort)):
                self.train(k)
                trained.append(self.finish())
        except Exception as error:
            self.tell(error)
            raise
        of: Any = TrainedClient(*map(list, zip(*trained, strict=True)))  # type: ignore[arg-type]
        # Clients share their rates nearly always: a vector of d step sizes is made once for each different tuple.
        sizes = {rates: self.bench.step_sizes(rates) for rates in set(of.rates)}
        result = LocalResult(
            w=_stacked(of.w), buffers=_stacked(of.buffers), counters=of.counters[-1], steps=of.steps, losses=of.losses,
            are_losses_finite=of.are_losses_finite, step_size=torch.cat([sizes[rates] for rates in of.rates]),
            taken=of.taken, records=of.records, kept=_stacked(of.kept),
            gradient_mean=None if of.gradient_mean[0] is None else _stacked(of.gradient_mean),
        )  # fmt: skip
        self.cohort.take(result)

    @abstractmethod
    def train(self, k: int) -> None:
        """Take all of the steps of the cohort's client k."""

    def tell(self, error: Exception, batch_idx: int | None = None, batch: Any = None) -> None:
        """Note on an exception at which client, round and batch it came up.

        Args:
            error: The exception.
            batch_idx: Number of the batch in its epoch; None outside of batches.
            batch: The batch, or None if it could not be made.
        """
        place = place_in_run(f"client {self.client}", self.bench.round)
        locate_step(error, place if batch_idx is None else f"{place}, batch {batch_idx}", batch)

    def begin(self, k: int, *, informs_module: bool = True) -> None:
        """Seed the generators, load the start model of client k, and make loader and optimizer as new.

        Args:
            k: The client's place in the cohort.
            informs_module: Whether to call :meth:`inform_module` at once; otherwise it is called here only if the
                user's code has a part in making the batches.
        """
        bench, cohort, asked = self.bench, self.cohort, self.asked
        self.client = client = cohort.ids[k]
        self.num_steps = self.num_updates = self.epoch = self.batches_passed = 0
        self.losses, self.sizes = list[Tensor](), list[int]()
        self._updates_by_rate: dict[tuple[float, ...], int] = {}  # learning rate of each group -> updates
        self.before = Taken() if cohort.taken_before is None else cohort.taken_before[k]
        self.is_module_informed = False
        self._metrics: dict[str, Tensor] = {}  # what the module logged in the last epoch
        seed_globals(derive(bench.seed, asked.purpose, bench.round, client), self.user.device)
        buffers, kept = cohort.start_buffers, cohort.start_kept
        bench.load(
            asked.start if asked.start.ndim == 1 else asked.start[k], cohort.start_counters,
            None if buffers is None else buffers[k], kept=None if kept is None else kept[k],
        )  # fmt: skip
        self.loader = bench.train_loader(client)
        self.num_batches = len(self.loader)
        bench.work.begin([client], self.local.num_steps(self.num_batches))
        self.first_epoch = self.before.whole_epochs(self.num_batches) if self.before.epochs else 0
        self.user.shim.start_client()
        self.collector = self.user.start_collecting()
        if informs_module or not self.loader.gathers_plainly:
            self.inform_module()
        self.optimizer.reset(asked.lr_scale, epochs=self.first_epoch, steps=self.before.steps)
        if client not in cohort.started:
            cohort.started.add(client)
            self.hooks.call("on_client_start", client)

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

    def step_schedulers(self) -> None:
        """Step the schedulers of interval ``epoch``, at the end of one."""
        self.optimizer.step_schedulers("epoch", self.current_epoch + 1, plateau=False)

    def count_step(self, batch_idx: int, *, is_update: bool = True, num_steps: int = 1) -> None:
        """Count an optimizer step that was made, with its learning rates, and step the schedulers of steps.

        Args:
            batch_idx: Number of the batch.
            is_update: Whether the step moved w.
            num_steps: Number of steps that were made up to this batch; without schedulers it may be more than 1.
        """
        if is_update:
            self.num_updates += num_steps
            rates = self.optimizer.rates
            self._updates_by_rate[rates] = self._updates_by_rate.get(rates, 0) + num_steps
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
        self.losses.append(loss.detach() if loss.ndim == 0 else loss.detach().reshape(()))
        self.sizes.append(size)

    # the end

    def finish(self) -> TrainedClient:
        """Return what the client's training gave, and what it counted and logged."""
        is_last = self.asked.is_last
        if is_last:
            self.hooks.call("on_client_end", self.client)
        layout, row = self.layout, self.bench.row
        shared, kept = row.split([layout.num_parameters, layout.num_kept]) if layout.num_kept else (row, row[:0])
        # A single client may hand out the workbench's own row: nothing is loaded into it before the cohort was read.
        w = shared.to(layout.master_dtype, copy=not (is_last and len(self.cohort) == 1))
        logged = self.collector.result()
        losses = read(self.losses)
        if losses:
            total = sum(loss * size for loss, size in zip(losses, self.sizes, strict=True))
            logged = {"loss": total / sum(self.sizes), **logged}
        else:
            logged.pop("loss", None)  # it trained nothing: `check_records` refuses a round of such clients
        return TrainedClient(
            w, kept.to(layout.master_dtype, copy=True), layout.read_buffers(), layout.read_counters(), self.num_updates,
            sum(losses) / len(losses) if losses else math.nan, all(map(math.isfinite, losses)), self._mean_rates(),
            self.before.plus(self.batches_passed, self.num_steps, self.num_batches),
            {"num_steps": self.num_steps, **{f"train_{name}": value for name, value in logged.items()}},
            self.gradient_mean,
        )  # fmt: skip

    def _mean_rates(self) -> tuple[float, ...]:
        if not self.num_updates:
            return (0.0,) * len(self.layout.group_parts)
        if len(self._updates_by_rate) == 1:
            return next(iter(self._updates_by_rate))
        weighted = [[rate * count for rate in rates] for rates, count in self._updates_by_rate.items()]
        return tuple(sum(group) / self.num_updates for group in zip(*weighted, strict=True))


class OptimizerRun(ClientRun):
    """Trains clients in epochs over their batches by steps of the user's own optimizer.

    A step is taken from its recording if there is one (:meth:`_replay`), as the module writes it
    (:meth:`_take_written`), or with Lightning's hooks inside (:class:`HookedStep`). What happens to its gradient then
    is :class:`LocalStep`.

    Args:
        bench: The workbench.
        cohort: The clients.
        asked: What the method asks for.
    """

    def __init__(self, bench: Workbench, cohort: Cohort, asked: Training) -> None:
        super().__init__(bench, cohort, asked)
        self.step = LocalStep(self.layout, asked, bench.row[None], bench.grad[None])
        self._hooked = HookedStep(self)
        self._given: tuple[Any, ...] = (*asked.terms, asked.after_step)
        self._contrast = asked.contrast if asked.contrast is not None and asked.contrast.weight else None
        self.training_step = bench.user.training_step

    def train(self, k: int) -> None:
        """Run the epochs; see the base class."""
        try:
            self._train(k)
        except MissingGradientError:
            # The optimizer's state lies in flat slices and is lost with them, so the client starts again.
            log.info(
                "A step left a parameter without a gradient, which torch leaves alone: from here on the optimizer "
                "gets the module's own parameters, not flat slices. Same numbers, a little slower."
            )
            self.optimizer.use_per_tensor()
            self._train(k)

    def _train(self, k: int) -> None:
        bench, optimizer, step = self.bench, self.optimizer, self.step
        self._is_plain = bench.takes_plain_steps and self._contrast is None
        self._gradients: Sequence[Tensor] | None = None  # of the last step, if it was replayed
        self.num_gradients = 0  # that were added up; more than steps if a closure is called several times
        if bench.scaler is not None:
            self._hooked.start_scaler(bench.scaler)
        self.begin(k, informs_module=not bench.runs_only_training_step)
        # The method made terms for all K clients; each client's steps see its own row of them.
        is_alone, own = len(self.cohort) == 1, slice(k, k + 1)
        if self._contrast is not None:
            self.training_step = ContrastedStep(bench, self._contrast.part(own)).training_step
        *terms, after_step = [each if each is None or is_alone else each.part(own) for each in self._given]
        if terms or after_step is not None:
            step.use(terms, after_step)
        step.start(lambda active: optimizer.plain_step(), lambda: bench.step_sizes(optimizer.rates))
        epoch, epochs, steps = 0, self.local.epochs or 1, self.local.steps
        while not self.user.shim.is_client_stopped and (epoch < epochs if steps is None else self.num_steps < steps):
            self._run_epoch(epoch)
            epoch += 1

    def finish(self) -> TrainedClient:
        """Return the mean gradient and the scale, too, and show callbacks the gradients of the last step."""
        step, scaler = self.step, self.bench.scaler
        if step.gradient_sum is not None:
            self.gradient_mean = step.gradient_sum[0, : self.layout.num_parameters] / max(self.num_gradients, 1)
        trained = super().finish()
        # No hook looks between the clients of a cohort.
        if self._gradients is not None and self.client == self.cohort.ids[-1]:
            self.layout.show_gradients(self._gradients)
        if scaler is not None:
            trained.records["grad_scale"] = scaler.get_scale()
        return trained

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
        if self.layout.num_optimized < self.bench.grad.numel():
            self.bench.grad[self.layout.num_optimized :].zero_()
        recorder, loader = self.bench.recorder, self.loader
        may_replay = self._is_plain and recorder.reason is None and not self.optimizer.has_step_hooks
        # Lists of batches of one form, between which nobody's code runs.
        is_known = type(loader) is ClientLoader and not self.user.has_transfer_hooks
        batches: Sequence[Any] = ()
        start = batch_idx = 0
        steps_before = self.num_steps
        try:
            for found in loader.stretches() if is_known else ([batch] for batch in loader):
                start, batches = 0, found
                batches = self._on_device(found)
                while start < len(batches):
                    count, is_over = (self._replay(batches[start:], batch_idx) if may_replay else 0), False
                    if not count:
                        count, is_over = 1, self._take_batch(batches[start], batch_idx)
                    start, batch_idx = start + count, batch_idx + count
                    is_enough = self.local.steps is not None and self.num_steps >= self.local.steps
                    if is_over or is_enough or self.user.shim.is_client_stopped:
                        if self._is_plain and batch_idx >= self.num_batches:
                            self.step_schedulers()
                        return
        except Exception as error:
            self.tell(error, batch_idx, batches[start] if start < len(batches) else None)
            raise
        finally:
            recorder.count_written(self.num_steps - steps_before)
        if self._is_plain:  # a loader of the user's may have given fewer batches than it says, or more
            self.step_schedulers()

    def _on_device(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return batches of one form on the device: where the first lies there already, all do."""
        to_device = self.user.to_device
        first = to_device(batches[0])
        return batches if first is batches[0] else [first, *map(to_device, batches[1:])]

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
        self.collector.start_batch(batches[count - 1], size, num_batches=count)
        views, first, take_step = self.bench.grad_views, self.layout.num_grouped, self.step.take
        logged: list[Sequence[Tensor]] = []
        with torch.no_grad():  # but not around the schedulers below, whose code may use autograd
            # What is not an operation happens once for all of these steps.
            for batch in batches[:count]:
                check()
                results = recording.replay(*self.layout.parameters, *batch)
                self._gradients = results[:first]
                foreach_copy(views, self._gradients)
                self.losses.append(results[first])
                logged.append(results[first + 1 :])
                take_step()
            log_replayed(self.collector, recording.calls, logged, size)
        self.sizes += [size] * count
        recording.credit -= count
        self.num_gradients += count
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
        if self._is_plain:
            self._take_written(batch, batch_idx, size)
            return False
        if self._hooked.take(batch, batch_idx, size):
            return False
        self.step_schedulers()
        self.batches_passed += self.num_batches - self.collector.num_batches  # the epoch counts as complete
        return True

    def _take_written(self, batch: Any, batch_idx: int, size: int) -> None:
        """Take a step in which nobody's code but ``training_step`` runs; compare it with its replay if it is time."""
        layout, recorder = self.layout, self.bench.recorder
        is_compared = recorder.listen()
        loss, _ = self.training_step(batch, batch_idx)
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
            self.num_gradients += 1
            self.optimizer.show_gradient()  # the step may have called self.optimizers().zero_grad()
            with torch.no_grad():
                self.step.take()
        self.count_step(batch_idx, is_update=loss is not None)


def _stacked(rows: Any) -> Tensor:
    """Return K rows as (K, n); a single one is not copied."""
    return torch.stack(rows) if len(rows) > 1 else rows[0][None]
