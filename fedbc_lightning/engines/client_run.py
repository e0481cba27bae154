"""What every way of training one client shares: its start, its batches, its message."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedbc_lightning.cohort import Cohort, is_finite
from fedbc_lightning.seeding import derive, seed_globals

if TYPE_CHECKING:
    from fedbc_lightning.engines.sequential import LocalTraining, SequentialEngine


class ClientRun:
    """One client's local training, with Lightning's hooks in Lightning's order.

    Args:
        engine: Its module, workbench and optimizer are used.
        cohort: The client, K = 1; :meth:`finish` fills it in.
        local: What this client does in this round.
    """

    def __init__(self, engine: SequentialEngine, cohort: Cohort, local: LocalTraining) -> None:
        self.engine, self.cohort, self.local = engine, cohort, local
        self.user, self.layout, self.optimizer = engine.user, engine.layout, engine.optimizer
        self.module, self.hooks = engine.user.module, engine.user.hooks
        (self.client,) = cohort.ids
        self.num_steps = self.num_updates = 0  # steps without any gradient, or that the scaler skipped, update nothing
        self.losses: list[Tensor] = []  # of the batches that had one, with their sizes
        self.sizes: list[int] = []
        self._updates_by_rate: Counter[tuple[float, ...]] = Counter()  # learning rate of each group -> updates
        self.epoch = 0

    def begin(self, start: Tensor, lr_scale: float, purpose: str) -> None:
        """Seed the generators, load the start model, and make loader and optimizer as new."""
        engine = self.engine
        seed_globals(derive(engine.seed, purpose, engine.round, self.client), self.user.device)
        engine.load(start.reshape(-1), self.cohort.start_counters, self.cohort.start_buffers)
        self.user.train_mode()
        self.loader = engine.datamodule.client_train_dataloader(
            self.client, engine.round, seed=engine.seed, device=self.user.device
        )
        self.num_batches = len(self.loader)
        self._tell_module()
        self.optimizer.reset(lr_scale)
        self.collector = self.user.start_collecting()
        if not self.cohort.has_started:
            self.cohort.has_started = True
            self.hooks.call("on_client_start", self.client)

    def _tell_module(self) -> None:
        planned = self.local.num_steps(self.num_batches)
        steps_per_epoch = -(-self.num_batches // self.local.accumulate_grad_batches)
        self.user.shim.set(
            max_epochs=self.local.epochs if self.local.epochs is not None else -(-planned // steps_per_epoch),
            max_steps=self.local.steps if self.local.steps is not None else -1,
            estimated_stepping_batches=planned,
            num_training_batches=self.num_batches,
            current_epoch=0,
            global_step=0,
            current_client=self.client,
            callback_metrics={},
            training=True,
        )

    # epochs

    def start_epoch(self, epoch: int) -> None:
        """The batches of an epoch are about to come."""
        self.epoch = epoch
        self.user.shim.set(current_epoch=epoch)
        self.loader.set_epoch(epoch)
        self.hooks.call("on_train_epoch_start")

    def end_epoch(self) -> None:
        """The epoch's last batch is done."""
        self.hooks.call("on_train_epoch_end")
        self.user.shim.set(callback_metrics=self.collector.current())
        self.optimizer.step_schedulers("epoch", self.epoch + 1, plateau=True)
        self.collector.end_epoch()
        self.layout.check_trainable()

    def count_step(self, batch_idx: int, *, is_update: bool = True) -> None:
        """An optimizer step was made: count it, with its learning rates, and move the schedulers of steps."""
        if is_update:
            self.num_updates += 1
            self._updates_by_rate[self.optimizer.rates] += 1
        self.num_steps += 1
        self.user.shim.set(global_step=self.num_steps)
        if self.optimizer.schedulers:
            self.optimizer.step_schedulers("step", batch_idx + 1, plateau=False)
            self.optimizer.step_schedulers("step", batch_idx + 1, plateau=True)

    # the end

    def finish(self, is_last: bool) -> None:
        """Fill in the cohort: what local training ended with, what it counted and logged."""
        if is_last:
            self.hooks.call("on_client_end", self.client)
        cohort, layout = self.cohort, self.layout
        # The workbench itself, unless it is about to be used again.
        cohort.w = self.engine.row.to(layout.master_dtype, copy=not is_last)[None]
        cohort.buffers = layout.read_buffers()[None]
        cohort.counters = layout.read_counters()
        cohort.steps[0] = self.num_updates
        cohort.step_size = self.engine.step_sizes(self._mean_rates())
        logged = self.collector.result()
        losses = self._read_losses()
        if losses:
            cohort.losses[0] = sum(losses) / len(losses)
            total = sum(loss * size for loss, size in zip(losses, self.sizes, strict=True))
            logged = {"loss": total / sum(self.sizes), **logged}
        if not (is_finite(cohort.model) and all(map(math.isfinite, losses))):
            cohort.valid[0] = False
        cohort.records[0].update(num_steps=self.num_steps, **{f"train_{name}": value for name, value in logged.items()})

    def _read_losses(self) -> list[float]:
        if self.user.device.type == "cpu":
            return [loss.item() for loss in self.losses]
        return torch.stack(self.losses).tolist() if self.losses else []  # one wait for the device

    def _mean_rates(self) -> Sequence[float]:
        if not self.num_updates:
            return [0.0] * len(self.layout.group_slices)
        weighted = [[rate * count for rate in rates] for rates, count in self._updates_by_rate.items()]
        return [sum(group) / self.num_updates for group in zip(*weighted, strict=True)]
