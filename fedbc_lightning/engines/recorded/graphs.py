"""CUDA graphs: the work that a function gives a GPU, launched at once, where each operation costs a launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.private_torch import TorchDispatchMode, foreach_copy
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.engines.recorded.recording import Replay


def takes_graphs(device: torch.device) -> bool:
    """Return whether recorded steps are launched as graphs on a device."""
    return device.type == "cuda"


def capture(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return what repeats the work that a function gives a GPU; it is called three times, and done twice.

    Raises:
        Exception: The GPU is waited for inside, numbers are drawn on the CPU, or CUDA cannot capture it for another
            reason.
    """
    space, now = _space(device), torch.cuda.current_stream(device)
    space.stream.wait_stream(now)
    collects = gc.isenabled()
    gc.disable()  # a graph that is freed meanwhile would break off the capture
    try:
        with torch.cuda.stream(space.stream):
            with NoDrawsOnCPU():
                work()  # libraries set up here what cannot be captured
            work()
            return _captured(work, space.pool).replay
    except _BrokenOffError as error:
        # torch goes on asking such a graph for its memory, and takes the generator as captured until the next capture.
        _given_up.append((error.graph, _spaces.pop(device)))
        _space(device)
        raise error.why from None
    finally:
        now.wait_stream(space.stream)
        if collects:
            gc.enable()


class _BrokenOffError(Exception):
    def __init__(self, graph: torch.cuda.CUDAGraph, why: Exception) -> None:
        super().__init__(why)
        self.graph, self.why = graph, why


def _captured(work: Callable[[], Any], pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except Exception:
            with suppress(Exception):  # it says only that the capture was broken off
                graph.capture_end()
            raise
        graph.capture_end()
    except Exception as error:
        raise _BrokenOffError(graph, error) from error
    return graph


class _Space(NamedTuple):
    """What all graphs of a device share, as they run one after another: memory, and the stream of their captures.

    torch refuses the memory of graphs that are all gone, so a small one stays.
    """

    pool: Any
    stream: torch.cuda.Stream
    graph: torch.cuda.CUDAGraph


_spaces: dict[torch.device, _Space] = {}
_given_up: list[Any] = []


def _space(device: torch.device) -> _Space:
    if device not in _spaces:
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            graph = _captured(lambda: torch.zeros(1, device=device), pool)
        _spaces[device] = _Space(pool, stream, graph)
    return _spaces[device]


class NoDrawsOnCPU(TorchDispatchMode):
    """Refuses numbers that are drawn on the CPU: in a graph they would be the same in each step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(found, Tensor) and found.is_cpu:
            raise ValueError("it draws numbers on the CPU")
        return found


def check_same(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
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
                check_same(replay(*inputs), self._results)
            self._launch = launch
        except Exception as error:
            self.obstacle = first_line(error)

    def _work(self) -> None:
        self._results = self._replay(*self._inputs)

    def operations(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Take the step operation by operation; see :data:`Replay`."""
        foreach_copy(self._inputs, inputs)
        return self._replay(*self._inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Take the step; see :data:`Replay`."""
        foreach_copy(self._inputs, inputs)
        self._launch()
        return *self._results[: self._num_gradients], *(each.clone() for each in self._results[self._num_gradients :])
