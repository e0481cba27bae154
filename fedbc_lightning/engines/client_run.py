"""The training of a cohort's clients, one after another: how each begins, counts its steps, and ends."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.core.seeding import derive, seed_globals
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.local_step import Training
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.module.collector import batch_size_of, by_plain_name
from fedbc_lightning.module.mistakes import locate_step, place_in_run
from fedbc_lightning.state import WrittenParametersError
from fedbc_lightning.state.cohort import Cohort, LocalResult, Taken


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
        is_epoch_over: Whether a hook has ended the epoch before its last batch.
        training_step: Computes the loss of a batch, as :meth:`UserModule.training_step` does.
        num_gradients: Number of gradients that were summed; more than steps if a closure is called several times. It is
            a row (d + p,) as soon as a step leaves out layers, see :meth:`ParameterLayout.moving_part`.
        replayed: The gradients of the last step, if it was replayed.
    """

    def __init__(self, bench: Workbench, cohort: Cohort, asked: Training) -> None:
        self.bench, self.cohort, self.asked, self.local = bench, cohort, asked, asked.local
        self.user, self.layout, self.optimizer = bench.user, bench.layout, bench.optimizer
        self.module, self.hooks = bench.user.module, bench.user.hooks
        self._sizes: dict[tuple[float, ...], Tensor] = {}
        # Losses, sizes of their batches and logged values of each client that has ended, which may still be computed
        self._unread: list[tuple[list[Tensor], list[int], dict[str, Any]]] = []
        self.training_step = bench.user.training_step

    def run(self) -> None:
        """Train all clients, and hand the cohort the result."""
        trained = []
        try:
            for k in range(len(self.cohort)):
                self.train(k)
                trained.append(self.finish())
            self._read(trained)
        except Exception as error:
            self.tell(error)
            raise
        self.cohort.take(_merged(trained))
        if not self.bench.has_hooks:  # nobody looks at the gradients of the last step
            self.layout.drop_gradients()
        # Whoever takes the steps refers to this object, and it to them: without this, all rows of a client would stay
        # in memory until Python's collector of such circles runs, which were 5 times the model for each of SCAFFOLD.
        vars(self).clear()

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
        place = place_in_run(self.client, self.bench.round, self.bench.datamodule.client_names)
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
        self.num_gradients: Tensor | int = 0
        self.replayed: Sequence[Tensor] | None = None
        self.losses, self.sizes = list[Tensor](), list[int]()
        # Learning rate of each group -> number of updates, by element of the row where layers were frozen for a time
        self._updates_by_rate: dict[tuple[float, ...], Tensor | int] = {}
        self.before = Taken() if cohort.taken_before is None else cohort.taken_before[k]
        self.is_module_informed = False
        frozen, own = cohort.started.get(client, (None, None))
        self.layout.put_frozen_back(frozen)
        seed_globals(derive(bench.seed, asked.purpose, bench.round, client), self.user.device)
        buffers, kept = cohort.start_buffers, cohort.start_kept
        bench.load(
            asked.start if asked.start.ndim == 1 else asked.start[k], cohort.start_counters[k],
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
        passed: dict[str, Any] = {"epochs": self.first_epoch, "steps": self.before.steps}
        self.optimizer.reset(asked.lr_scale, own=own, **passed)
        if client in cohort.started or not self.hooks.listens("on_client_start"):
            return
        with self.optimizer.taking_own("on_client_start") as own:
            self.hooks.call("on_client_start", client)
        cohort.started[client] = self.layout.frozen_now(), own or None
        if own:
            self.optimizer.reset(asked.lr_scale, own=own, **passed)

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
        self.epoch, self.is_epoch_over = epoch, False
        self.loader.set_epoch(epoch)
        if self.is_module_informed:
            self.user.shim.set(current_epoch=self.current_epoch)
            self.hooks.call("on_train_epoch_start")

    def end_epoch(self) -> None:
        """Call what belongs after the last batch of an epoch."""
        self.collector.is_in_batch = False
        self.check_steps()
        if self.is_module_informed:
            self.hooks.call("on_train_epoch_end")
            if self.is_epoch_over or self.collector.num_batches >= self.num_batches:  # not in an epoch that was stopped
                self.optimizer.step_schedulers("epoch", self.current_epoch + 1, plateau=True)
            self.check_trainable()
        self.collector.end_epoch()

    def check_trainable(self) -> None:
        """Raise if a step or hook of the client has frozen, thawed or written what it may not."""
        where = f"a hook or step of client {self.client} in round {self.bench.round}, epoch {self.current_epoch},"
        self.layout.check_trainable(where, is_in_client=self.asked.solver is None)

    def start_batch(self, batch: Any, batch_idx: int) -> int:
        """Prepare for a step that is not replayed, and return the number of samples of its batch."""
        check()
        if not self.is_module_informed:
            self.inform_module()
        self.replayed = None
        size = self.size_of(batch, batch_idx)
        self.collector.start_batch(batch, size)
        return size

    def step_schedulers(self) -> None:
        """Step the schedulers of interval ``epoch``, at the end of one."""
        self.optimizer.step_schedulers("epoch", self.current_epoch + 1, plateau=False)

    def count_step(
        self,
        batch_idx: int,
        *,
        is_update: bool = True,
        num_steps: int = 1,
        rates: tuple[float, ...] | None = None,
        part: Tensor | bool = True,
    ) -> None:
        """Count an optimizer step that was made, with its learning rates, and step the schedulers of steps.

        Args:
            batch_idx: Number of the batch.
            is_update: Whether the step moved w.
            num_steps: Number of steps that were made up to this batch; without schedulers it may be more than 1.
            rates: Learning rate of each parameter group in the step; None for those that the optimizer has now.
            part: What the step moved, see :meth:`ParameterLayout.moving_part`.
        """
        if is_update:
            self.num_updates += num_steps
            rates = self.optimizer.rates if rates is None else rates
            self._updates_by_rate[rates] = self._updates_by_rate.get(rates, 0) + num_steps * part
        self.num_steps += num_steps
        self.bench.work.num_steps += num_steps
        if self.is_module_informed:
            self.user.shim.set(global_step=self.global_step)
        if self.optimizer.schedulers:
            self.optimizer.step_schedulers("step", batch_idx + 1, plateau=False)
            self.optimizer.step_schedulers("step", batch_idx + 1, plateau=True)

    def check_steps(self) -> None:
        """Refuse hooks that changed, for the steps just taken, the momentum or decay on which the method relies."""
        if self.bench.kept_to and self.bench.has_hooks:
            self.optimizer.check_steps(f"a hook of client {self.client}")

    def size_of(self, batch: Any, batch_idx: int) -> int:
        """Return the number of samples of a batch; what its tensors do not tell follows from its place in the epoch."""
        size = self.loader.batch_size
        return batch_size_of(batch, min(size, self.loader.num_samples - batch_idx * size))

    def count_loss(self, loss: Tensor, size: int) -> None:
        """Keep the loss of a batch of so many samples; it is read from the device at the end."""
        self.losses.append(loss.detach() if loss.ndim == 0 else loss.detach().reshape(()))
        self.sizes.append(size)

    # the end

    def finish(self) -> LocalResult:
        """Return what the client's training gave, and what it counted and logged."""
        is_last = self.asked.is_last
        counts = list(self._updates_by_rate.values()) if "rate" in self.bench.kept_to else []
        if len(counts) > 1 or any((torch.as_tensor(count) % self.num_updates).any() for count in counts):
            raise ConfigurationError(
                f"model: within client {self.client} the learning rate changed, or a layer was frozen for a time, and "
                "the method builds on equal steps of all layers; set rates in configure_optimizers, in hooks of rounds "
                "or in on_client_start, and freeze for all of a client's steps."
            )
        if is_last:
            self.hooks.call("on_client_end", self.client)
        self.layout.put_frozen_back()
        layout, row = self.layout, self.bench.row
        if changed := layout.changed_forms():
            raise WrittenParametersError(changed)
        shared, kept = row.split([layout.num_parameters, layout.num_kept]) if layout.num_kept else (row, row[:0])
        # A single client may hand out the workbench's own row: nothing is loaded into it before the cohort was read.
        w = shared.to(layout.master_dtype, copy=not (is_last and len(self.cohort) == 1))
        self._unread.append((self.losses, self.sizes, by_plain_name(self.collector.means())))
        return LocalResult(
            w[None], layout.read_buffers()[None], layout.read_counters()[None], [self.num_updates],
            [math.nan], self._step_size()[None],
            [self.before.plus(self.batches_passed, self.num_steps, self.num_batches)], [{"num_steps": self.num_steps}],
            kept=kept.to(layout.master_dtype, copy=True)[None],
        )  # fmt: skip

    def _read(self, trained: Sequence[LocalResult]) -> None:
        """Read losses and logged values of all clients, for which a GPU is waited for once, into their results."""
        values = [value for losses, _, means in self._unread for value in (*losses, *means.values())]
        numbers = iter(read(values))
        for result, (losses, sizes, means) in zip(trained, self._unread, strict=True):
            found = list(islice(numbers, len(losses)))
            logged = dict(zip(means, islice(numbers, len(means)), strict=True))
            if found:
                result.losses = [sum(found) / len(found)]
                total = sum(loss * size for loss, size in zip(found, sizes, strict=True))
                logged = {"loss": total / sum(sizes), **logged}
            else:
                logged.pop("loss", None)  # it trained nothing: `check_records` refuses a round of such clients
            # What else is known of the client comes after what it logged.
            num_steps, *more = result.records[0].items()
            result.records[0] = dict([num_steps, *((f"train_{name}", value) for name, value in logged.items()), *more])

    def _step_size(self) -> Tensor:
        """Return the mean learning rate of each parameter over the steps that moved w, (1,) or (d,)."""
        counts, rates = self._updates_by_rate, (0.0,) * len(self.layout.group_parts)
        if any(isinstance(count, Tensor) for count in counts.values()):
            total: Any = sum(self.bench.row_rates(rates) * count for rates, count in counts.items())
            return (total / self.num_updates)[0, : self.layout.num_parameters]
        if len(counts) == 1:
            rates = next(iter(counts))
        elif counts:
            weighted = [[rate * count for rate in rates] for rates, count in counts.items()]
            rates = tuple(sum(group) / self.num_updates for group in zip(*weighted, strict=True))
        # Clients share their rates nearly always: a vector of d step sizes is made once for each different tuple.
        if rates not in self._sizes:
            self._sizes[rates] = self.bench.step_sizes(rates)[0]
        return self._sizes[rates]


def _merged(results: Sequence[LocalResult]) -> LocalResult:
    """Merge the results of single clients into one; a single one is not copied."""
    if len(results) == 1:
        return results[0]
    merged: dict[str, Any] = {name: [getattr(each, name) for each in results] for name in vars(results[0])}
    for name, column in merged.items():
        if column[0] is None:
            merged[name] = column[-1]
        elif isinstance(column[0], list):
            merged[name] = [value for values in column for value in values]
        else:  # rows of one number take the length of the others
            merged[name] = torch.cat(torch.broadcast_tensors(*column))
    return LocalResult(**merged)
