"""CUDA graphs: the work that a function gives a GPU, launched at once, where each operation costs a launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.devices import read
from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.private_torch import foreach_copy
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.engines.recorded.recording import Replay


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

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Take the step; see :data:`Replay`."""
        foreach_copy(self._inputs, inputs)
        self._launch()
        return *self._results[: self._num_gradients], *(each.clone() for each in self._results[self._num_gradients :])
