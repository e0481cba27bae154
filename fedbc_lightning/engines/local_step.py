"""One local training, and what its step does with a gradient, for one client or K; the order is written here alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.local import AfterStep, ModelContrast, Solver, Term
from fedbc_lightning.local.engine import Trains
from fedbc_lightning.state.layout import ParameterLayout


class Training(NamedTuple):
    """One local training of a cohort, as a method asks for it with ``engine.solve``.

    Attributes:
        start: The model at which training starts, (d + b,) or (K, d + b).
        local: The local training of these clients.
        has_own_epochs: Whether the method gave a number of epochs in place of the trainer's.

    All other attributes are the arguments of :meth:`fedbc_lightning.local.engine.Engine.solve`.
    """

    start: Tensor
    local: LocalTraining
    has_own_epochs: bool = False
    terms: Sequence[Term] = ()
    solver: Solver | None = None
    after_step: AfterStep | None = None
    lr_scale: float = 1.0
    record_gradient_mean: bool = False
    purpose: str = "client"
    is_last: bool = True
    trains: Trains = "all"
    contrast: ModelContrast | None = None


class LocalStep:
    """Moves rows w (K, d + p) once their gradients (K, d + p) are there.

    A step adds the raw gradient to the sum of gradients, adds the gradients of the method's terms, holds the part that
    is not trained, clips, lets the optimizer move w, applies the method's after-step, and puts the held part back::

        G ← G + g;   g ← g + Σ ∇term(w);   g[held] ← 0;   g ← clip(g);
        w ← optimizer(w, g);   w ← after-step(w);   w[held] ← start

    The steps of one client are those of K = 1. How a gradient is found (as the module's step is written, by its
    recording, or mapped over clients) is not known here.

    Args:
        layout: The layout of the rows.
        asked: What the method asks for.
        w: The iterates, (K, d + p).
        grad: Their gradients, (K, d + p).

    Attributes:
        terms: The terms that are not zero: a zero one must not give a gradient to a parameter that has none.
        gradient_sum: G, (K, d + p), or None.
    """

    def __init__(self, layout: ParameterLayout, asked: Training, w: Tensor, grad: Tensor) -> None:
        self._layout, self._asked, self._w, self._grad = layout, asked, w, grad
        self._held = layout.held_part(asked.trains)
        self._held_values = w[:, :0]
        self.gradient_sum: Tensor | None = None
        self.use(asked.terms, asked.after_step)

    def use(self, terms: Sequence[Term], after_step: AfterStep | None) -> None:
        """Take the method's terms and after-step for the rows, e.g. those of another client."""
        self.terms: list[Any] = [term for term in terms if not term.is_zero]
        self._after_step, self._term_rows = after_step, len(self._w)

    @property
    def holds(self) -> bool:
        """Whether a part of the rows is not trained."""
        return self._held is not None

    def graph_form(self) -> tuple | None:
        """Return what a CUDA graph of a step depends on beside terms and optimizer, or None if there can be none.

        A graph knows no memory that is made anew for each client: the sum of gradients, the held part, and targets.
        """
        has_more = self.gradient_sum is not None or self.changes_after or self._grad.dtype != self._layout.master_dtype
        local = self._asked.local
        return None if has_more else (local.gradient_clip_val, local.gradient_clip_algorithm)

    @property
    def changes_after(self) -> bool:
        """Whether something happens after the optimizer's step."""
        return self.holds or self._after_step is not None

    def start(self, move: Callable[[int], Any], step_sizes: Callable[[], Tensor]) -> None:
        """Prepare for steps from the weights that the rows hold now.

        Args:
            move: Returns the function that lets the optimizer move the first rows, given their number.
            step_sizes: Returns the current learning rates, (1, 1) or (1, d).
        """
        self._move, self._step_sizes = move, step_sizes
        self._active, self._changes = -1, list[Callable[[], Any]]()
        if self._asked.record_gradient_mean:
            self.gradient_sum = torch.zeros_like(self._grad, dtype=self._layout.master_dtype)
        if self._held is not None:
            self._held_values = self._w[:, self._held].clone()

    def take(self, active: int = 1) -> None:
        """Take a step of the first rows; the clients of the others have finished. Call this without autograd."""
        # A list of functions that are bound once: most of a small model's step is Python, and this is called in each.
        if active != self._active:
            self._active = active
            before, after = [*self._additions(active), *self._clipping(active)], self._endings(active)
            self._changes = [*before, self._move(active), *after]
        for change in self._changes:
            change()

    def add(self, *, is_summed: bool = True) -> None:
        """Do what comes before clipping, for a step in which hooks look at the gradient."""
        for addition in self._additions(len(self._w), is_summed=is_summed):
            addition()

    def clip(self) -> None:
        """Clip the gradients."""
        for clipping in self._clipping(len(self._w)):
            clipping()

    @torch.no_grad()
    def end(self, step_sizes: Callable[[], Tensor], *, is_update: bool, part: Tensor | bool = True) -> None:
        """Do what comes after the optimizer's step; without an update only the held part is put back.

        Args:
            step_sizes: Returns the learning rates of that step, which hooks may have changed since.
            is_update: Whether the optimizer moved w.
            part: What the optimizer moved, see :meth:`ParameterLayout.moving_part`; the rest stays as it is.
        """
        self._step_sizes = step_sizes
        before = self._w.clone() if isinstance(part, Tensor) and self.changes_after else None
        for ending in self._endings(len(self._w), is_update=is_update):
            ending()
        if before is not None:
            self._w.copy_(torch.where(part, self._w, before))  # type: ignore[arg-type]

    # parts

    def _additions(self, active: int, *, is_summed: bool = True) -> list[Callable[[], Any]]:
        found: list[Callable[[], Any]] = []
        if self.gradient_sum is not None and is_summed:
            moving = slice(active), slice(self._layout.num_optimized)  # outside of all groups there are no steps
            found.append(partial(self.gradient_sum[moving].add_, self._grad[moving]))
        if self.terms and self._grad.dtype != self._layout.master_dtype:
            found.append(self._add_in_master_dtype)
        elif self.terms:
            # The rows of finished clients stay in the terms until they are half of them: cutting costs, too.
            if active <= self._term_rows // 2:
                self._term_rows = active
                self.terms = [term.part(slice(active)) for term in self.terms]
            rows = self._layout.shared(self._grad)[: self._term_rows], self._layout.shared(self._w)[: self._term_rows]
            found += [partial(term.add_gradient, *rows) for term in self.terms]
        if self._held is not None:
            found.append(self._grad[:, self._held].zero_)
        return found

    def _clipping(self, active: int) -> list[Callable[[], Any]]:
        if not self._asked.local.gradient_clip_val:
            return []
        gradients = self._grad[:active, : self._layout.num_optimized]
        return [partial(self._asked.local.clip, gradients, self._layout.optimized_sizes)]

    def _endings(self, active: int, *, is_update: bool = True) -> list[Callable[[], Any]]:
        found: list[Callable[[], Any]] = []
        if self._after_step is not None and is_update:
            found.append(partial(self._apply, self._after_step, active))
        if self._held is not None:  # weight decay moves what has no gradient
            found.append(partial(self._w[:, self._held].copy_, self._held_values))
        return found

    def _add_in_master_dtype(self) -> None:
        """Add the terms' gradients to rows of two bytes per number, of which a sum would lose digits."""
        rows = self._layout.shared(self._grad), self._layout.shared(self._w)
        grad, w = (row.to(self._layout.master_dtype) for row in rows)
        for term in self.terms:
            term.add_gradient(grad, w)
        rows[0].copy_(grad)

    def _apply(self, after_step: AfterStep, active: int) -> None:
        rows, ended = self._layout.shared(self._w), self._w[active:].clone()
        w = rows.to(self._layout.master_dtype)
        after_step.apply(w, self._step_sizes())
        if w is not rows:
            rows.copy_(w)
        if len(ended):
            self._w[active:] = ended
