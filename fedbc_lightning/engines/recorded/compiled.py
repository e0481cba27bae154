"""Recorded steps as C++: Inductor compiles a loop over batches, with the method's terms and the steps of plain SGD.

Inductor is given the recording's operations themselves: no Python is read, and nothing but shapes is looked at in a
call. A call takes up to 64 steps, because to enter C++ from Python costs as much as a step of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, fx
from torch.func import functionalize

from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.private_torch import compile_graph, repeat_while, trace
from fedbc_lightning.distributed.interrupts import check
from fedbc_lightning.engines.recorded.step_recorder import Recording
from fedbc_lightning.state.layout import ParameterLayout

COMPILE_AFTER = (500, 100_000, 100_000, 100_000)
"""Number of replays of one form before it is compiled: of the first form of a run, the second, ...; four at most.

To compile takes 4 CPU seconds and, once, 2 for the import of Inductor. Compiling saves 20 us a step on W1 and 100 us on
W2 of benchmarks/engines.py, so it is repaid after 60,000 to 300,000 steps; the first form is what the user asked for.
"""
MAX_STEPS, MAX_BYTES = 64, 2**24
"""Largest number of steps in one call, and of bytes that their batches may take."""
TOLERANCE = 1_000
"""Largest difference between a compiled and a recorded step, in units of the dtype's rounding of the largest value.

In float32 this is 1.2e-4; sums in another order differ by 1e-7 to 1e-6.
"""
NUMBERS = ("lr", "momentum", "weight_decay")


class CompiledStep:
    """Takes many steps in one call, as recording, terms and SGD would one after another, but for last digits.

    Args:
        layout: The layout of the parameters.
        recording: The recorded step.
        group: The settings of SGD.
        rows: The weights, and the momentum if there is one.
        terms: The terms, which have :attr:`~fedbc_lightning.local.Proximal.inputs` and ``gradient``.
        batch: A batch of the form that the recording takes.

    Attributes:
        num_compared: Number of comparisons of the recording at the time when this was last compared with it.
    """

    def __init__(
        self, layout: ParameterLayout, recording: Recording, group: dict[str, Any], rows: list[Tensor],
        terms: Sequence[Any], batch: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.num_compared = -1
        self._count, self._numbers = torch.zeros((), dtype=torch.int64), torch.zeros(len(NUMBERS), dtype=torch.float64)
        self.bind(group, rows, terms)
        first, last = len(rows), len(rows) + len(batch)  # the places of the batch among the tensors of a step

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            w, *momenta = tensors[:first]
            (lr, momentum, decay), inputs = tensors[last], list(tensors[last + 1 :])
            parameters = [w[entry.offset : entry.end].view(entry.shape) for entry in layout.entries]
            results = recording.replay(*parameters, *tensors[first:last])
            gradient = torch.cat([part.reshape(1, -1) for part in results[: layout.num_grouped]], dim=1)
            for term in terms:
                gradient = gradient + term.gradient(w[None], *[inputs.pop(0) for _ in term.inputs])
            direction = -gradient[0] if group["maximize"] else gradient[0]
            if group["weight_decay"]:
                direction = direction + decay * w
            if momenta:
                momenta = [momentum * momenta[0] + direction]
                direction = direction + momentum * momenta[0] if group["nesterov"] else momenta[0]
            return w - lr * direction, *momenta, *results[layout.num_grouped :]

        traced = trace(functionalize(step), [*rows, *batch, *self._inputs])
        self._constants = _lift_constants(traced)
        values = [node.meta["val"] for node in traced.graph.output_node().args[0][first:]]  # type: ignore[index,union-attr]
        capacity = max(1, min(MAX_STEPS, MAX_BYTES // sum(part.nbytes for part in batch)))
        self._batches = [torch.zeros(capacity, *part.shape, dtype=part.dtype) for part in batch]
        self._outputs = [torch.zeros(capacity, dtype=value.dtype) for value in values]
        self._places = torch.arange(capacity)

        def is_going_on(k: Tensor, count: Tensor, *_: Tensor) -> Tensor:
            return k < count

        def take_step(k: Tensor, count: Tensor, places: Tensor, *tensors: Tensor) -> tuple[Tensor]:
            batch = [part.index_select(0, k.reshape(1))[0] for part in tensors[first:last]]
            results = traced(*tensors[:first], *batch, *tensors[last + len(values) :])
            for row, new in zip(tensors[:first], results[:first], strict=True):
                row.copy_(new)
            for output, value in zip(tensors[last : last + len(values)], results[first:], strict=True):
                output.copy_(torch.where(places == k, value, output))
            return (k + 1,)

        def loop(*tensors: Tensor) -> tuple[Tensor, ...]:
            return repeat_while(is_going_on, take_step, (torch.zeros((), dtype=torch.int64),), tensors)

        self._loop = compile_graph(loop, self._arguments(rows))

    def bind(self, group: dict[str, Any], rows: list[Tensor], terms: Sequence[Any]) -> None:
        """Let the next steps be those with these numbers, rows and terms."""
        for k, name in enumerate(NUMBERS):
            self._numbers[k] = group[name]
        self._rows, self._inputs = rows, [self._numbers, *(tensor for term in terms for tensor in term.inputs)]

    def take(self, batches: Sequence[Sequence[Tensor]], rows: list[Tensor] | None = None) -> list[Sequence[Tensor]]:
        """Take a step on each batch, and return the loss of each and what it logged.

        Args:
            batches: Batches of the form for which this was compiled.
            rows: Rows to change in place of those that were bound.
        """
        found: list[Sequence[Tensor]] = []
        capacity = len(self._places)
        for start in range(0, len(batches), capacity):
            check()
            chosen = batches[start : start + capacity]
            for memory, parts in zip(self._batches, zip(*chosen, strict=True), strict=True):
                torch.stack(parts, out=memory[: len(chosen)])
            self._count.fill_(len(chosen))
            self._loop(self._arguments(rows or self._rows))
            found += zip(*[output[: len(chosen)].clone().unbind() for output in self._outputs], strict=True)
        return found

    def _arguments(self, rows: list[Tensor]) -> list[Tensor]:
        places = [self._count, self._places]
        return [*places, *rows, *self._batches, *self._outputs, *self._inputs, *self._constants]

    def predict(self, batches: Sequence[Sequence[Tensor]]) -> None:
        """Take steps on copies, before the recording takes them, for :meth:`is_right`."""
        self._before, self._copies = self._rows[0].clone(), [row.clone() for row in self._rows]
        self._predicted = self.take(batches, self._copies)

    def is_right(self, recorded: Sequence[Sequence[Tensor]]) -> bool:
        """Return whether the steps that the recording has taken are the predicted ones.

        Args:
            recorded: The loss of each recorded step, and what it logged.
        """
        copied, written = (rows[0] - self._before for rows in (self._copies, self._rows))
        rounding = 4 * torch.finfo(written.dtype).eps * float(_finite(self._before).abs().max())
        given = [(*self._rows, *chain.from_iterable(recorded)), (*self._copies, *chain.from_iterable(self._predicted))]
        pairs = zip(*reversed(given), strict=True)
        return _is_near(copied, written, rounding) and all(_is_near(a, b) for a, b in pairs)


class StepCompiler:
    """Compiles recorded steps that come often, and compares them with their recordings.

    A compiled step is compared at its first use, and each time that its recording was compared with the step as
    written. The step that is compared is the recorded one.

    Args:
        layout: The layout of the parameters.
        row: The row of weights (d,).
        is_wanted: Whether the user has asked for compiled steps.

    Attributes:
        is_over: Whether no step is compiled, or no longer.
    """

    def __init__(self, layout: ParameterLayout, row: Tensor, *, is_wanted: bool) -> None:
        self._layout, self._row = layout, row
        self._num_compiled, self.is_over = 0, not is_wanted
        self._told: set[str] = set()
        if self.is_over:
            return
        if layout.num_optimized < len(row) or layout.num_kept:
            self._stop("only modules are compiled whose parameters are all optimized and shared")
        elif row.device.type != "cpu" or layout.dtype != layout.master_dtype:
            self._stop("only steps on a CPU in float32 or float64 are compiled")

    def ready(
        self, recording: Recording, sgd: tuple[dict[str, Any], Tensor] | None, terms: Sequence[Any],
        batches: Sequence[Any],
    ) -> CompiledStep | None:  # fmt: skip
        """Return the compiled step that takes the place of a recording, or None if the recording is to be replayed.

        Args:
            recording: The recording.
            sgd: Settings and momentum of SGD, or None if the steps consist of something else.
            terms: The terms that are added to the gradient, also those that are zero for this client.
            batches: The batches of the next steps.
        """
        if self.is_over:
            return None
        if sgd is None or not all("gradient" in vars(type(term)) for term in terms):
            self.tell("only steps of SGD in one group, with terms such as FedBC's and nothing else, are compiled")
            return None
        if recording.draws_random_numbers:
            self.tell("steps that draw random numbers are not compiled")
            return None
        group, momentum = sgd
        rows = [self._row, momentum] if group["momentum"] else [self._row]
        tensors = [*rows, *(tensor for term in terms for tensor in term.inputs)]
        key = (
            *[bool(group[name]) for name in ("weight_decay", "nesterov", "maximize")],
            *map(type, terms),
            *[(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors],
        )
        found = recording.compiled.get(key)
        if found is None:
            recording.counts[key] = recording.counts.get(key, 0) + len(batches)
            if recording.counts[key] < self._compile_after:
                return None
            self._num_compiled += 1
            try:
                found = CompiledStep(self._layout, recording, group, rows, terms, batches[0])
            except Exception as error:  # there is no compiler, or it or Inductor fails at this step
                self._stop(f"compiling failed ({first_line(error)}); it needs a C++ compiler such as g++")
                return None
            recording.compiled[key] = found
        else:
            found.bind(group, rows, terms)
        return found

    @property
    def _compile_after(self) -> float:
        return COMPILE_AFTER[self._num_compiled] if self._num_compiled < len(COMPILE_AFTER) else float("inf")

    def compare(self, recording: Recording, compiled: CompiledStep, recorded: Sequence[Sequence[Tensor]]) -> None:
        """Compare predicted steps with the recorded ones, and compile no more if they differ."""
        if compiled.is_right(recorded):
            compiled.num_compared = recording.num_compared
        else:
            is_first = compiled.num_compared < 0
            since = (
                "" if is_first else "; steps since the comparison before this one, at most a round ago, may be wrong"
            )
            self._stop(f"compiled, it gives other numbers than recorded{since}")

    def tell(self, reason: str) -> None:
        """Say once why steps are replayed instead."""
        if reason not in self._told:
            self._told.add(reason)
            rank_zero_warn(f"trainer.record_steps: compile replays training_step as auto does, because {reason}.")

    def _stop(self, reason: str) -> None:
        self.is_over = True
        self.tell(reason)


def _is_near(a: Tensor, b: Tensor, rounding: float = 0.0) -> bool:
    """Return whether two tensors agree within the tolerance and an absolute error."""
    if not b.is_floating_point():
        return torch.equal(a, b)
    allowed = TOLERANCE * torch.finfo(b.dtype).eps * float(_finite(b).abs().max())
    return torch.allclose(a, b, rtol=0.0, atol=allowed + rounding, equal_nan=True)


def _finite(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def _lift_constants(traced: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a graph holds into further inputs of it, and return them."""
    found: list[Tensor] = []
    *_, last = (node for node in traced.graph.nodes if node.op == "placeholder")
    for node in [node for node in traced.graph.nodes if node.op == "get_attr"]:
        found.append(getattr(traced, node.target))
        with traced.graph.inserting_after(last):
            last = traced.graph.placeholder(f"constant_{len(found)}")
        node.replace_all_uses_with(last)
        traced.graph.erase_node(node)
    traced.recompile()
    return found
