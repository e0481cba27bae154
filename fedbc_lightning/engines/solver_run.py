"""Local training by a solver that writes out its own steps, on losses and gradients at any point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.private_torch import count_as_stepped
from fedbc_lightning.core.seeding import derive, numpy_generator, seed_globals
from fedbc_lightning.engines.client_run import ClientRun
from fedbc_lightning.engines.local_step import Training
from fedbc_lightning.engines.step_function import collecting
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.local import Proximal, Term
from fedbc_lightning.module.collector import MetricCollector, batch_size_of
from fedbc_lightning.state.cohort import Cohort


@dataclass
class Batch:
    """One batch of a client's stream of batches.

    Attributes:
        data: The batch, on the device.
        index: Number of the batch in its epoch.
        size: Number of samples.
        is_counted: Whether its loss and what it logged were counted already; the first gradient on it counts.
        loss: The loss at which that first gradient was taken.
    """

    data: Any
    index: int
    size: int
    is_counted: bool = False
    loss: Tensor | None = None


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
        self.layout.drop_gradients()
        with torch.enable_grad(), nullcontext() if is_logged else collecting(self.user, MetricCollector()):
            loss, _ = self.user.training_step(batch, batch_idx)
            if loss is not None:
                self.bench.backward(loss, calls_hooks=self._calls_hooks)
        gradient = torch.zeros_like(self.bench.grad)
        self.layout.collect_gradients(gradient)
        return self._scalar(loss), gradient.to(self.layout.master_dtype)[None]

    def _go_to(self, w: Tensor) -> None:
        # A solver's iterate is a copy in the master dtype, which half precision rounds here.
        if w.data_ptr() != self.bench.row.data_ptr():
            self.bench.row.copy_(w[0])

    def _scalar(self, loss: Tensor | None) -> Tensor:
        self.has_loss = loss is not None
        # A batch without a loss counts as loss 0 in sums, as Lightning's loop skips it; `has_loss` tells them apart.
        zero = torch.zeros((), dtype=self.layout.master_dtype, device=self.bench.row.device)
        return zero if loss is None else loss.detach().reshape(()).to(zero)


class SolverSteps(ABC):
    """The part of a solver's :class:`~fedbc_lightning.local.solvers.Client` that is alike for one client and for K."""

    bench: Workbench
    cohort: Cohort
    terms: list[Term]
    num_steps: int

    @abstractmethod
    def evaluate(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the losses at w, (K, 1), and their gradients (K, d), both without the terms."""

    def evaluate_loss(self, w: Tensor, batch: Any) -> Tensor:
        """Return the losses at w, (K, 1), without the terms; buffers are as before."""
        return self.evaluate(w, batch)[0]

    def gradient(self, w: Tensor, batch: Any) -> Tensor:
        """Return the mini-batch gradients g_i(w_i; batch_i), (K, d), including the terms."""
        return self.add_terms(self.evaluate(w, batch)[1], w)

    def loss_and_gradient(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the losses at w, (K, 1), and their gradients (K, d), both including the terms."""
        loss, gradient = self.evaluate(w, batch)
        return self._with_terms(loss, w), self.add_terms(gradient, w)

    def same_draws(self) -> None:
        """Reset the random generators to this step's seed: call it before each of several comparable evaluations."""
        bench = self.bench
        seed = derive(bench.seed, "same draws", bench.round, self.cohort.ids[0], step=self.num_steps)
        seed_globals(seed, bench.user.device)

    def trial_loss(self, w: Tensor, batch: Any) -> Tensor:
        """Return the losses at w, (K, 1), including the terms, with the draws of :meth:`same_draws`."""
        # A line search compares losses at several w: other dropout masks would decide it by chance.
        self.same_draws()
        return self._with_terms(self.evaluate_loss(w, batch), w)

    def add_terms(self, gradient: Tensor, w: Tensor) -> Tensor:
        """Add the gradients of the terms to those of the losses, in place, and return them."""
        for term in self.terms:
            term.add_gradient(gradient, w)
        return gradient

    def _with_terms(self, loss: Tensor, w: Tensor) -> Tensor:
        for term in self.terms:
            loss = loss + term.value(w)[:, None]
        return loss


class SolverRun(ClientRun, SolverSteps):
    """Trains a client by a solver, which sees it as a :class:`~fedbc_lightning.local.solvers.Client`.

    Args:
        bench: The workbench.
        cohort: The cohort, of this client alone (K = 1).
        asked: What the method asks for: the solver, and terms that are added to every gradient and loss.

    Attributes:
        w: The iterate (1, d), which a solver writes.
        num_steps: Number of steps taken so far.
        num_batches: Number of batches per epoch.
    """

    def __init__(self, bench: Workbench, cohort: Cohort, asked: Training) -> None:
        super().__init__(bench, cohort, asked)
        self.oracle, self.w = Oracle(bench), bench.row[None]
        self.terms = [*(term for term in asked.terms if not term.is_zero), *weight_decay_terms(bench)]
        self._batch: Batch | None = None
        self._raw: Iterator[tuple[int, Any]] | None = None  # batches that are left in the current epoch

    def train(self, k: int) -> None:
        """Let the solver take its steps; see the base class."""
        solver: Any = self.asked.solver
        self.begin(k)
        self.w = self.bench.row.to(self.layout.master_dtype, copy=True)[None]
        count_as_stepped(self.optimizer.optimizer)  # torch's schedulers warn of one that never stepped
        solver.begin(self)
        for _ in range(solver.num_steps(self)):
            solver.step(self)
            self.count_step(self.num_steps)
            if self.user.shim.is_client_stopped:
                raise ConfigurationError(
                    "model: it sets self.trainer.should_stop inside a client, but the method takes a fixed number of "
                    "steps of its own; leave it out, or take a method that uses the module's optimizer."
                )
        self._end_batch()
        if self._raw is not None:
            self.end_epoch()
        solver.end(self)
        self.bench.row.copy_(self.w[0])

    def tell(self, error: Exception, batch_idx: int | None = None, batch: Any = None) -> None:
        """Note where an exception came up; the batch is the last one that the solver has drawn. See the base class."""
        drawn = self._batch
        super().tell(error, *((batch_idx, batch) if drawn is None else (drawn.index, drawn.data)))

    # what a solver asks for

    @property
    def rates(self) -> Tensor:
        """The user's current learning rates: (1, 1), or (1, d) if they differ between parameters."""
        return self.bench.step_sizes(self.optimizer.rates)

    def next_batch(self) -> Batch:
        """Return the next batch of the client's shuffled data; a new epoch starts whenever one ends."""
        self._end_batch()
        found = next(self._raw, None) if self._raw is not None else None
        if found is None:
            if self._raw is not None:
                self.end_epoch()
                self.epoch += 1
            self.start_epoch(self.epoch)
            self._raw = enumerate(self.loader)
            found = next(self._raw)
        index, raw = found
        self.batches_passed += 1
        data = self.user.to_device(raw)
        self._batch = Batch(data, index, self.size_of(data, index))
        self.collector.start_batch(data, self._batch.size)
        self.hooks.call("on_train_batch_start", data, index)
        return self._batch

    def evaluate(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss at w, (1, 1), and its gradient (1, d), both without the terms."""
        loss, gradient = self.oracle.loss_and_gradient(w, batch.data, batch.index, is_logged=not batch.is_counted)
        if not batch.is_counted:
            self.check_trainable()  # on_train_batch_end may thaw what was frozen for this batch
            batch.is_counted, batch.loss = True, loss
            if self.oracle.has_loss:
                self.count_loss(loss, batch.size)
        return loss.reshape(1, 1), gradient

    def evaluate_loss(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the loss at w, (1, 1), without the terms."""
        # BatchNorm's statistics must not learn from a batch once for every length that a line search tries.
        values, counters = self.layout.read_buffers(), self.layout.read_counters()
        loss = self.oracle.loss(w, batch.data, batch.index)
        self.layout.write_buffers(values, counters)
        return loss.reshape(1, 1)

    @property
    def num_components(self) -> int:
        """Number m of fixed batches into which the client's data is cut."""
        return len(self.bench.datamodule.batch_shares(self.client))

    def component_gradient(self, w: Tensor, index: int) -> Tensor:
        r"""Return ∇f_ij(w), (1, d), of the fixed batch j = `index`; the plain mean over all j is ∇f_i(w)."""
        shares = self.bench.datamodule.batch_shares(self.client)
        batch = self.user.to_device(self.bench.components(self.client)[index])
        size = batch_size_of(batch, 1)
        self.collector.start_batch(batch, size)
        loss, gradient = self.oracle.loss_and_gradient(w, batch, index, is_logged=True)
        if self.oracle.has_loss:
            self.count_loss(loss, size)
        # Shares m_j / m times their number: the plain mean over batches of unequal sizes is then the gradient of f_i.
        return self.add_terms(gradient * (shares[index] * len(shares)), w)

    def full_gradient(self, w: Tensor) -> Tensor:
        """Return ∇f_i(w), (1, d), over all of the client's data."""
        gradients = [self.component_gradient(w, index) for index in range(self.num_components)]
        return torch.stack(gradients).mean(0) if len(gradients) > 1 else gradients[0]

    def rng(self, purpose: str, *, of_client: bool = True) -> np.random.Generator:
        """Return a generator that depends on (seed, purpose, round), and on the client if ``of_client`` is True."""
        client = self.client if of_client else -1
        return numpy_generator(self.bench.seed, purpose, self.bench.round, client)

    # parts

    def _end_batch(self) -> None:
        if self._batch is not None:
            self.hooks.call("on_train_batch_end", {"loss": self._batch.loss}, self._batch.data, self._batch.index)
            self._batch = None

    def end_epoch(self) -> None:
        """Call what belongs after the last batch of an epoch."""
        self.step_schedulers()
        super().end_epoch()


def weight_decay_terms(bench: Workbench) -> list[Term]:
    """Return the weight decay of the user's SGD as a term, because a solver's own steps do not use that optimizer."""
    optimizer, layout = bench.optimizer.optimizer, bench.layout
    if type(optimizer) is not torch.optim.SGD or not any(g["weight_decay"] for g in optimizer.param_groups):
        return []
    rates = bench.row_rates([float(group["weight_decay"]) for group in optimizer.param_groups])
    return [Proximal(rates, torch.zeros_like(bench.grad, dtype=layout.master_dtype))]
