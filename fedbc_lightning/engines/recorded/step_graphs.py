"""Recorded steps on a GPU as CUDA graphs: all of a step is launched at once, where each operation costs a launch.

A graph repeats the work of a GPU on the same memory. Therefore whatever changes from step to step, or from client to
client, is copied into memory that stays: the batch, what the method's terms hold (λ_i, the centre), learning rates and
momentum. Weights and gradient lie in the rows of the workbench anyway.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.private_torch import foreach_copy
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.recorded.recording import Replay
from fedbc_lightning.engines.step_function import tensors_of

if TYPE_CHECKING:
    from fedbc_lightning.engines.local_step import LocalStep
    from fedbc_lightning.engines.recorded.step_recorder import Recording
    from fedbc_lightning.engines.workbench import Workbench

log = logging.getLogger("lightning.pytorch." + __name__)

# Largest number of steps whose losses and logged values a graph keeps.
STEPS_IN_A_ROW = 256


def takes_graphs(device: torch.device) -> bool:
    """Return whether recorded steps are launched as graphs on a device."""
    return device.type == "cuda"


def capture(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return what repeats the work that a function gives a GPU; it is done three times by this call.

    Raises:
        Exception: The GPU is waited for inside, or CUDA cannot capture it for another reason.
    """
    graph, stream, now = torch.cuda.CUDAGraph(), torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(now)
    generator = torch.cuda.default_generators[now.device.index]
    draws = generator.clone_state()
    collects = gc.isenabled()
    gc.disable()  # a graph that is freed meanwhile would break off the capture
    try:
        with torch.cuda.stream(stream):
            work()  # libraries set up here what cannot be captured
            work()
            graph.capture_begin(pool=_pool(device), capture_error_mode="thread_local")
            try:
                work()
            except Exception:
                with suppress(Exception):  # it says only that the capture was broken off
                    graph.capture_end()
                raise
            graph.capture_end()
    except Exception:
        generator.graphsafe_set_state(draws)  # else it takes the capture as going on, and refuses to draw
        raise
    finally:
        now.wait_stream(stream)
        if collects:
            gc.enable()
    return graph.replay


_pools: dict[torch.device, tuple[Any, torch.cuda.CUDAGraph]] = {}


def _pool(device: torch.device) -> Any:
    """Return the memory that all graphs share, as they run one after another.

    torch refuses the memory of graphs that are all gone, so an empty one stays. Call this on a stream of its own.
    """
    if device not in _pools:
        pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()
        _pools[device] = pool, graph
    return _pools[device][0]


def _check_same(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Raise if a graph has computed something else than its operations one by one, but for the order of sums."""
    pairs = [
        (a, b) if a.is_floating_point() else (a.double(), b.double()) for a, b in zip(expected, found, strict=True)
    ]
    if not all(read((a - b).abs().max() <= 1e-3 * a.abs().max() for a, b in pairs if a.numel())):
        raise ValueError("its graph gives other numbers")


class GradientGraph:
    """A recorded step of one client or K clients as a graph, whose inputs lie anywhere.

    Args:
        replay: The recorded step.
        inputs: Inputs for which it was recorded; this object keeps their memory.
        num_gradients: Number of the results at the front that hold only until the next call.

    Attributes:
        obstacle: The reason why there is no graph, and the step is replayed operation by operation; else None.
    """

    def __init__(self, replay: Replay, inputs: list[Tensor], num_gradients: int) -> None:
        self._replay, self._inputs, self._num_gradients = replay, inputs, num_gradients
        self._results: Sequence[Tensor] = ()
        self.obstacle: str | None = None
        self._launch: Callable[[], Any] = self._work
        try:
            with torch.no_grad():
                launch = capture(self._work, inputs[0].device)
                with preserved_globals(inputs[0].device):
                    launch()
                _check_same(replay(*inputs), self._results)
            self._launch = launch
        except Exception as error:
            self.obstacle = first_line(error)

    def _work(self) -> None:
        self._results = self._replay(*self._inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Take the step; see :data:`Replay`."""
        foreach_copy(self._inputs, inputs)
        self._launch()
        return *self._results[: self._num_gradients], *(each.clone() for each in self._results[self._num_gradients :])


class StepGraph:
    """A whole step of one client as a graph: its gradient, terms, clipping, and the optimizer's move.

    Args:
        bench: The workbench.
        recording: The recorded gradient.
        step: What happens to the gradient.
        batch: A batch of the form of the recording.

    Attributes:
        gradients: The gradients of the last step, without the terms.
    """

    def __init__(self, bench: Workbench, recording: Recording, step: LocalStep, batch: Sequence[Tensor]) -> None:
        layout, sgd, first = bench.layout, bench.optimizer.graphed, bench.layout.num_grouped
        assert sgd is not None
        self._batch, buffers = [part.clone() for part in batch], layout.buffers()
        inputs = [*layout.parameters, *buffers, *self._batch]
        told = slice(first, first + 1 + len(tensors_of(recording.calls)))
        self._place = torch.zeros(1, dtype=torch.int64, device=bench.row.device)
        self._columns = [value.new_zeros(STEPS_IN_A_ROW) for value in recording.operations(*inputs)[told]]
        self.gradients: Sequence[Tensor] = ()

        def work() -> None:
            results = recording.operations(*inputs)
            self.gradients = results[:first]
            foreach_copy(bench.grad_views, tuple(self.gradients))
            if buffers:
                foreach_copy(buffers, results[-len(buffers) :])
            for column, value in zip(self._columns, results[told], strict=True):
                column.index_copy_(0, self._place, value.reshape(1))
            self._place.add_(1).remainder_(STEPS_IN_A_ROW)
            step.take()

        # Neither weights nor momentum are moved by this, however it ends.
        states = [bench.row, bench.grad, *buffers, *sgd.momenta]
        before = tuple(state.clone() for state in states)
        sgd.is_captured = True
        try:
            with preserved_globals(bench.row.device):
                work()
            expected = [state.clone() for state in states]
            with preserved_globals(bench.row.device):
                self._launch = capture(work, bench.row.device)
            foreach_copy(states, before)
            self._launch()  # with the draws of the first time
            _check_same(expected, states)
        finally:
            sgd.is_captured = False
            foreach_copy(states, before)

    def take(self, batches: Sequence[Any]) -> list[Sequence[Tensor]]:
        """Take a step on each batch, at most :data:`STEPS_IN_A_ROW`; return loss and logged values of each."""
        self._place.zero_()
        for batch in batches:
            check()
            foreach_copy(self._batch, batch)
            self._launch()
        return list(zip(*(column[: len(batches)].clone().unbind() for column in self._columns), strict=True))


class StepGraphs:
    """Finds the graph of a step, or captures it.

    Args:
        bench: The workbench.
    """

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self.is_on = takes_graphs(bench.row.device)
        self._terms: dict[tuple, list[Any]] = {}

    def adopt(self, terms: Sequence[Any]) -> list[Any]:
        """Return terms whose values lie in memory that stays from client to client, as graphs need it."""
        form = _form(terms) if self.is_on else None
        if form is None:
            return list(terms)
        mine = self._terms.get(form)
        if mine is None:
            mine = self._terms[form] = [copy.copy(term) for term in terms]
            for own, term in zip(mine, terms, strict=True):
                vars(own).update({name: getattr(term, name).clone() for name in term.varying})
        for own, term in zip(mine, terms, strict=True):
            foreach_copy(
                [getattr(own, name) for name in term.varying], tuple(getattr(term, name) for name in term.varying)
            )
        return mine

    def find(self, recording: Recording, step: LocalStep, batch: Sequence[Tensor]) -> StepGraph | None:
        """Return the graph of the steps that come, or None if they are replayed operation by operation."""
        if not self.is_on:
            return None
        sgd = self._bench.optimizer.graphed
        key = sgd and sgd.settle(), step.graph_form(), _form(step.terms)
        if None in key:
            return None
        if key not in recording.graphs:
            recording.graphs[key] = self._captured(recording, step, batch)
        return recording.graphs[key]

    def _captured(self, recording: Recording, step: LocalStep, batch: Sequence[Tensor]) -> StepGraph | None:
        try:
            with preserved_globals(self._bench.row.device):
                return StepGraph(self._bench, recording, step, batch)
        except Exception as error:
            self._bench.say(
                f"Recorded steps are replayed operation by operation, not as CUDA graphs: {first_line(error)}. The "
                "numbers are the same."
            )
            return None


def _form(terms: Sequence[Any]) -> tuple | None:
    """Return the classes of terms, and of what varies in them the shapes and dtypes; None for other classes."""
    if not all(hasattr(term, "varying") for term in terms):
        return None
    return tuple((type(t), *((getattr(t, n).shape, getattr(t, n).dtype) for n in t.varying)) for t in terms)
