"""Whole steps on a GPU as CUDA graphs.

A graph repeats the work of a GPU on the same memory. Therefore whatever changes from step to step, or from client to
client, is copied into memory that stays: the batch, what the method's terms hold (λ_i, the centre), learning rates and
momentum. Weights and gradient lie in the rows of the workbench anyway.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.private_torch import foreach_copy
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.local_step import LocalStep
from fedbc_lightning.engines.recorded.graphs import capture, check_same, takes_graphs
from fedbc_lightning.engines.recorded.step_recorder import Recording
from fedbc_lightning.engines.step_function import tensors_of
from fedbc_lightning.module.client_optimizers import LocalOptimizer
from fedbc_lightning.state.layout import ParameterLayout

log = logging.getLogger("lightning.pytorch." + __name__)

# Largest number of steps whose losses and logged values a graph keeps.
STEPS_IN_A_ROW = 256
# Largest number of graphs of one recording: settings of the optimizer that change in each round make new ones.
MAX_GRAPHS = 8


class Rows(NamedTuple):
    """What a step works on: weights w (d + p,) and gradient (d + p,), their layout, and the optimizer that moves w."""

    w: Tensor
    grad: Tensor
    layout: ParameterLayout
    optimizer: LocalOptimizer


class StepGraph:
    """A whole step of one client as a graph: its gradient, terms, clipping, and the optimizer's move.

    Args:
        rows: Where it works.
        recording: The recorded gradient.
        step: What happens to the gradient.
        batch: A batch of the form of the recording.

    Attributes:
        gradients: The gradients of the last step, without the terms.
    """

    def __init__(self, rows: Rows, recording: Recording, step: LocalStep, batch: Sequence[Tensor]) -> None:
        layout, sgd, first, device = rows.layout, rows.optimizer.graphed, rows.layout.num_grouped, rows.w.device
        views = layout.views(rows.grad)[:first]
        assert sgd is not None
        self._batch, self._buffers = [part.clone() for part in batch], [each.clone() for each in layout.buffers()]
        if any(part.is_cpu for part in self._batch) and not rows.w.is_cpu:
            raise ValueError("a part of the batch lies on the CPU")
        buffers, inputs = self._buffers, [*layout.parameters, *self._buffers, *self._batch]
        told = slice(first, first + 1 + len(tensors_of(recording.calls)))
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._columns = [value.new_zeros(STEPS_IN_A_ROW) for value in recording.operations(*inputs)[told]]
        self.gradients: Sequence[Tensor] = ()

        def work() -> None:
            results = recording.operations(*inputs)
            self.gradients = results[:first]
            foreach_copy(views, tuple(self.gradients))
            if buffers:
                foreach_copy(buffers, results[-len(buffers) :])
            for column, value in zip(self._columns, results[told], strict=True):
                column.index_copy_(0, self._place, value.reshape(1))
            self._place.add_(1).remainder_(STEPS_IN_A_ROW)
            step.take()

        # Neither weights nor momentum are moved by this, however it ends.
        states = [rows.w, rows.grad, *buffers, *sgd.momenta]
        before = tuple(state.clone() for state in states)

        def done() -> list[Tensor]:
            moved = [state - old for state, old in zip(states, before, strict=True)]
            return moved + [column[:1].clone() for column in self._columns]

        sgd.is_captured = True
        try:
            with preserved_globals(device):
                work()
            expected = done()
            with preserved_globals(device):
                self._launch = capture(work, device)
            foreach_copy(states, before)
            self._place.zero_()
            self._launch()  # with the draws of the first time
            check_same(expected, done())
        finally:
            sgd.is_captured = False
            foreach_copy(states, before)

    def take(self, batches: Sequence[Any], buffers: list[Tensor]) -> list[Sequence[Tensor]]:
        """Take a step on each batch, at most :data:`STEPS_IN_A_ROW`.

        Args:
            batches: The batches.
            buffers: The module's buffers as they are now; a step as written may have put others in their places.

        Returns:
            Loss and logged values of each step.
        """
        self._place.zero_()
        self._copy(self._buffers, buffers)
        for batch in batches:
            check()
            foreach_copy(self._batch, tuple(batch))
            self._launch()
        self._copy(buffers, self._buffers)
        return list(zip(*(column[: len(batches)].clone().unbind() for column in self._columns), strict=True))

    def _copy(self, into: list[Tensor], values: list[Tensor]) -> None:
        if into:
            foreach_copy(into, tuple(values))


class StepGraphs:
    """Finds the graph of a step, or captures it.

    Args:
        rows: Where steps work.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows, self.is_on = rows, takes_graphs(rows.w.device)
        self._terms: dict[tuple, list[Any]] = {}

    def adopt(self, terms: Sequence[Any]) -> list[Any]:
        """Return terms whose values lie in memory that stays from client to client, as graphs need it."""
        form = _form(terms) if self.is_on else None
        if form is None:
            return list(terms)
        mine = self._terms.get(form)
        if mine is None:
            mine = self._terms[form] = [copy.copy(term) for term in terms]
            for own in mine:
                vars(own).update({name: getattr(own, name).clone() for name in own.varying})
        for own, term in zip(mine, terms, strict=True):
            foreach_copy(
                [getattr(own, name) for name in term.varying], tuple(getattr(term, name) for name in term.varying)
            )
        return mine

    def find(self, recording: Recording, step: LocalStep, batch: Sequence[Tensor]) -> StepGraph | None:
        """Return the graph of the steps that come, or None if they are replayed operation by operation."""
        if not self.is_on:
            return None
        form, sgd = (step.graph_form(), _form(step.terms)), self._rows.optimizer.graphed
        # Only where there can be a graph do momentum and rates go into its memory.
        key = sgd.settle() if sgd and None not in form else None, form
        if key[0] is None:
            return None
        if key not in recording.graphs:
            if len(recording.graphs) >= MAX_GRAPHS:
                recording.graphs.clear()
            recording.graphs[key] = self._captured(recording, step, batch)
        return recording.graphs[key]

    def _captured(self, recording: Recording, step: LocalStep, batch: Sequence[Tensor]) -> StepGraph | None:
        try:
            with preserved_globals(self._rows.w.device):
                return StepGraph(self._rows, recording, step, batch)
        except Exception as error:
            log.info(
                f"Recorded steps are replayed operation by operation, not as CUDA graphs: {first_line(error)}. The "
                "numbers are the same."
            )
            return None


def _form(terms: Sequence[Any]) -> tuple | None:
    """Return the classes of terms, and of what varies in them the shapes and dtypes; None for other classes."""
    if not all("varying" in vars(type(term)) for term in terms):  # a derived class may read more
        return None
    return tuple((type(t), *((getattr(t, n).shape, getattr(t, n).dtype) for n in t.varying)) for t in terms)
