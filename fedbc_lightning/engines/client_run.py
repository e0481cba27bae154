"""The part of one client's training that all ways of training share: its start, its epochs, and its result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from torch import Tensor

from fedbc_lightning.core.devices import read
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.mistakes import locate_step, place_in_run
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

    # the end

    def finish(self, is_last: bool) -> None:
        """Keep what local training ended with, and what it counted and logged."""
        if is_last:
            self.hooks.call("on_client_end", self.client)
        # A single client may hand out the workbench's own row: nothing is loaded into it before the cohort was read.
        is_kept = is_last and len(self.cohort) == 1
        shared, kept = self.bench.row.split([self.layout.num_parameters, self.layout.num_kept])
        self.w = shared.to(self.layout.master_dtype, copy=not is_kept)
        self.kept = kept.to(self.layout.master_dtype, copy=True)
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
