"""Decides when a step of the user's module may be replayed, and when it must be run as written."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from fedbc_lightning.core.described import attributes_of
from fedbc_lightning.core.devices import read, wide_dtype
from fedbc_lightning.core.errors import first_line
from fedbc_lightning.core.local_training import RecordSteps
from fedbc_lightning.core.private_torch import CALL_HOOKS, is_hooked
from fedbc_lightning.core.recordable import is_promised
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.engines.recorded.graphs import GradientGraph, takes_graphs
from fedbc_lightning.engines.recorded.recording import NotRecordableError, Replay, record
from fedbc_lightning.engines.step_function import (
    LoggedCall,
    LoggedCalls,
    StepFunction,
    StepOutput,
    tensors_of,
    with_tensors,
)
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.hooks import CLIENT_HOOKS
from fedbc_lightning.state.layout import ParameterLayout

log = logging.getLogger("lightning.pytorch." + __name__)

# Precisions that are no more than a context around the forward pass.
RECORDED = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
# Number of steps of one shape after which it is recorded.
# To record takes 100 to 200 ms; a replay saves 0.1 ms in each step, and 1 ms in a mapped one.
RECORD_AFTER = {"single": 500, "mapped": 60}
# On a GPU an operation of a step costs ten times as much, and a CUDA graph of all of them as much as a few.
RECORD_ON_GPU = {"single": 50, "mapped": 15}
# Number of replays that are compared with the step as written before replays are trusted.
NUM_TRIALS = 3
# Once replays are trusted, one step in this many is still run as written and compared.
# The second number holds once a step was compared ``NUM_OFTEN`` times. A comparison takes five times as long as a
# replay: one in 64 is 8 % of the training of a small model.
COMPARE_EVERY, COMPARE_RARELY = 64, 1024
# Number of good comparisons of one recording after which its step is compared rarely.
NUM_OFTEN = 10
# Seconds of a step below which a line says what a promise would save, by kind of device. Steps as written take 1.67
# times the CPU seconds of recorded ones on W1, 1.24 on W2 and W4 (benchmarks/engines.py, two runs).
SHORT_STEP = {"cpu": 1e-3, "cuda": 1e-2}
# Largest numbers of recordings, and of shapes that are counted: they bound the memory of data with many shapes.
MAX_RECORDINGS, MAX_SHAPES = 100, 10_000


@dataclass
class Recording:
    """A recorded step.

    Attributes:
        replay: Takes the step, on a GPU perhaps as one graph.
        operations: Takes the step operation by operation.
        calls: What the step logs.
        num_gradients: Number of gradients, which come first among its results.
        draws_random_numbers: Whether the step draws random numbers.
        num_compared: Number of replays that were compared with the step as written.
        credit: Number of steps that may be replayed before one is compared again.
        compared_after: Number of changes after which a replay was last compared.
        graphs: Whole steps as CUDA graphs, by what they depend on; None for those that cannot be captured.
    """

    replay: Replay
    operations: Replay
    calls: list[LoggedCall]
    num_gradients: int
    draws_random_numbers: bool
    num_compared: int = 0
    credit: int = 0
    compared_after: int = -1
    graphs: dict[tuple, Any] = field(default_factory=dict)


class StepRecorder:
    """Records steps whose shapes come often, and replays their operations.

    A recording holds what the step did once, so the user must promise that it is a function of weights and batch: by
    the decorator :func:`fedbc_lightning.recordable`, or by ``record_steps: true``. Nevertheless some steps are run as
    written and compared with the replay, bit for bit on a CPU: the first ones of each shape, the first one of a round
    where something may have changed since the one before, and one in 64, later one in 1,024.

    Args:
        user: The user's module.
        layout: The layout of its parameters.
        record_steps: Which steps are recorded, as in ``trainer.record_steps``.
        name: Name of the step, such as ``test_step``.

    Attributes:
        function: The step as a function of parameters and batch.
        record_after: Number of steps of one shape before it is recorded, by kind.
        is_due: Whether the step after the one that is taken will be recorded.
        num_changes: How often something may have changed that steps depend on: in the first round, and in each later
            one if there are hooks, or if a step reads from ``self.trainer``.
        reason: The reason why steps are not recorded, or None if they are.
        lacks_promise: Whether the only reason is that nobody has given the promise.
    """

    def __init__(
        self, user: UserModule, layout: ParameterLayout, record_steps: RecordSteps = "auto", name: str = "training_step"
    ) -> None:
        self._user, self._module, self._layout, self._name = user, user.module, layout, name
        self.function = StepFunction(user, layout, name)
        self.record_after: Mapping[str, float] = RECORD_ON_GPU if takes_graphs(user.device) else RECORD_AFTER
        self._counts: dict[tuple, int] = {}
        self._found: dict[tuple, Recording] = {}
        self._waiting: tuple[Recording, StepOutput] | None = None
        self._replayed: StepOutput | None = None
        self._heard: LoggedCalls | None = None
        self._step, self._modes = getattr(user.module, name), user.evaluating
        self._num_written = 0  # -1 once the line about the promise is due no more
        self._started: float | None = None
        self.is_due, self.num_changes, self._reads_trainer = False, 0, False
        self._is_asked = record_steps is True and name == "training_step"
        self.reason: str | None = None
        if record_steps is False:
            self.reason = "trainer.record_steps is false"
        elif layout.changing:
            self.reason = f"it changes the shape of the buffer '{layout.changing[0]}'"
        elif type(user.precision) not in RECORDED or getattr(user.precision, "scaler", None) is not None:
            self.reason = f"precision {user.precision.precision}"
        elif any(map(user.hooks.listens, CLIENT_HOOKS)):
            self.reason = "hooks are called between clients"
        elif name != "training_step" and user.hooks.is_there_any:  # each form comes a few times between two of them
            self.reason = "hooks may change what it reads"
        # How far two orders of the same sums may lie apart, as a fraction of a tensor's largest element.
        self.tolerance = 0.05 if isinstance(user.precision, MixedPrecision) else 1e-4
        self.lacks_promise = self.reason is None and not self._is_asked and not is_promised(user.module, name)
        if self.lacks_promise:
            self.reason = "nobody promises that it is a function of weights and batch"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without recordings, which are about the objects of this process."""
        nothing = dict.fromkeys(("_waiting", "_replayed", "_heard", "_step", "_modes"))
        return {**vars(self), "_counts": {}, "_found": {}, **nothing}

    def promise(self) -> None:
        """Record steps without the decorator: who chooses ``engine: vectorized`` gives the same promise by that."""
        if self.lacks_promise:
            self.lacks_promise, self.reason = False, None

    def count_written(self, num_steps: int) -> None:
        """Count steps that were taken as written; say once, if they are short, what a promise would save."""
        if not self.lacks_promise or self._num_written < 0 or self._user.device.type not in SHORT_STEP:
            return
        now = time.perf_counter()
        if self._started is None:  # the first epoch may include making the data
            self._started = now
            return
        self._num_written += num_steps
        if self._num_written < RECORD_AFTER["single"]:
            return
        seconds, self._num_written = (now - self._started) / self._num_written, -1
        if seconds < SHORT_STEP[self._user.device.type]:
            log.info(
                f"{type(self._module).__name__}.training_step: a step takes {1000 * seconds:.2f} ms, of which much is "
                "Python and autograd. If it is a function of weights and batch (it keeps no state, and looks at no "
                "value), promise that by the decorator fedbc_lightning.recordable or by trainer.record_steps: true. "
                "Steps are then recorded and replayed: the same numbers, and small models train 1.2 to 1.7 times as "
                "fast on a CPU, and several times as fast on a GPU, where all of a step is launched at once."
            )

    def start_round(self, has_hooks: bool) -> None:
        """Let each recording be compared once more if something may have changed since the last round.

        All are forgotten if the step, modes or hooks on layers are new.

        Args:
            has_hooks: Whether the module or a callback has hooks, in which anything may be set.
        """
        if not self.num_changes and self._is_asked and self.reason is not None:
            log.info(f"trainer.record_steps: true records no step of {type(self._module).__name__}: {self.reason}.")
        self.num_changes += has_hooks or self._reads_trainer or not self.num_changes
        step, modes = getattr(self._module, self._name), self._user.evaluating
        if step != self._step or modes != self._modes or (self._found and has_torch_hooks(self._module)):
            self._found.clear()
            self._counts.clear()
        self._step, self._modes = step, modes

    def ready(self, kind: str, parameters: Sequence[Tensor], batch: Any) -> Recording | None:
        """Return the recording of a step, or None if the caller must run it as written and give it to :meth:`compare`.

        As long as no code of the user's runs, the caller may replay as many steps on batches of this form as the
        recording's credit allows, and takes them off. Call this under ``torch.no_grad``.

        Args:
            kind: Name of a method of :class:`StepFunction`, such as ``"single"``.
            parameters: The parameters of one client, or of K clients.
            batch: The batch of one client, or those of K clients.
        """
        self._waiting = self._replayed = None
        self.is_due = False
        form = _form(batch) if self.reason is None else None
        if form is None:
            return None
        key = (kind, *form)
        found = self._found.get(key) or self._consider(kind, key, parameters, batch)
        if found is None:
            return None
        if found.credit:
            if found.compared_after == self.num_changes:
                return found
            # A GPU rounds to TF32, by which the order of sums moves a gradient further than a change of the step may.
            if kind == "mapped" and not found.draws_random_numbers and self._user.device.type == "cpu":
                return found if self._compare_first(found, parameters, batch) else None
        devices = [self._user.device] if self._user.device.type == "cuda" else []
        # The step as written, which follows, must draw the same numbers.
        with torch.random.fork_rng(devices) if found.draws_random_numbers else nullcontext():
            try:
                self._waiting = found, self._replay(found, parameters, batch)
            except Exception as error:  # some kernels refuse the arguments with which they were traced
                self._stop(f"torch cannot replay it: {first_line(error)}")
        return None

    def take(self, kind: str, parameters: Sequence[Tensor], batch: Any) -> StepOutput:
        """Take a step, replayed or by :attr:`function`; see :meth:`ready` for the arguments."""
        with torch.no_grad():
            found = self.ready(kind, parameters, batch)
            if found is not None:
                found.credit -= 1
                replayed, self._replayed = self._replayed, None
                return self._replay(found, parameters, batch) if replayed is None else replayed
        output = getattr(self.function, kind)(parameters, batch)
        self.compare(output)
        return output

    def listen(self) -> bool:
        """Return, before a step as written, whether it will be compared; if so, keep what it logs."""
        if self._waiting is None:
            return False
        self._heard = LoggedCalls(self._user.collector)
        self._user.collector = self._heard  # type: ignore[assignment]
        return True

    def look_at(self, loss: Tensor) -> None:
        """Record no more if a step as written gives gradients to other tensors than parameters, as no replay does."""
        try:
            self.function.check_leaves(loss)
        except NotRecordableError as error:
            self._stop(str(error))

    def compare(self, written: StepOutput | None) -> None:
        """Compare a step as written, or None if it had no loss, with its replay; record no more if they differ."""
        heard, self._heard = self._heard, None
        if heard is not None:
            self._user.collector = heard._collector
        if self._waiting is None or self.reason is not None:
            return
        (found, replayed), self._waiting = self._waiting, None
        if written is not None and heard is not None:
            written.logged = heard.calls
        tolerance = 0.0 if self._user.device.type == "cpu" else self.tolerance
        if written is not None and is_same(written, replayed, tolerance):
            found.compared_after = self.num_changes
            found.num_compared += 1
            found.credit = self._spacing(found) - 1
            return
        self._stop_late(found)

    # parts

    def _replay(self, found: Recording, parameters: Sequence[Tensor], batch: Any) -> StepOutput:
        results = found.replay(*parameters, *batch)
        first, calls = found.num_gradients, found.calls
        last = first + 1 + len(tensors_of(calls))
        told = calls and with_tensors(calls, results[first + 1 : last])
        return StepOutput(results[:first], results[first], told, results[last:])

    def _spacing(self, found: Recording) -> int:
        """Return the number of steps of which one is compared."""
        if found.num_compared < NUM_TRIALS:
            return 1
        return COMPARE_EVERY if found.num_compared < NUM_OFTEN else COMPARE_RARELY

    def _compare_first(self, found: Recording, parameters: Sequence[Tensor], batch: Any) -> bool:
        """Return whether for the first of K clients the replayed step is the step as written."""
        found.compared_after = self.num_changes
        replayed = self._replay(found, parameters, batch)
        first = [parameter[0].clone() for parameter in parameters]
        try:
            with preserved_globals(self._user.device):
                written: StepOutput | None = self.function.single(first, type(batch)(part[0].clone() for part in batch))
        except NotRecordableError:
            written = None
        of_first = StepOutput(
            [gradient[0] for gradient in replayed.gradients], replayed.loss[0],
            with_tensors(replayed.logged, [value[0] for value in tensors_of(replayed.logged)]),
            [buffer[0] for buffer in replayed.buffers],
        )  # fmt: skip
        if written is not None and is_same(written, of_first, self.tolerance):
            self._replayed = replayed
            return True
        self._stop_late(found)
        return False

    def _consider(self, kind: str, key: tuple, parameters: Sequence[Tensor], batch: Any) -> Recording | None:
        """Return a recording of a shape once it has come often enough, or None."""
        if len(self._counts) > MAX_SHAPES:
            self._counts.clear()
        count = self._counts[key] = self._counts.get(key, 0) + 1
        # A tensor that stands twice in a batch would be a single input of the recording.
        is_double = len({id(tensor) for tensor in batch}) < len(batch)
        # Recording a step whose gradients go elsewhere could write traced tensors there: the one before is looked at.
        after = self.record_after["single" if kind == "single" else "mapped"]
        self.is_due = count + 1 == after
        if count < after or len(self._found) >= MAX_RECORDINGS or is_double:
            return None
        try:
            self._found[key] = found = self._record(kind, parameters, batch)
        except NotRecordableError as error:
            self._stop(str(error))
            return None
        return found

    def _record(self, kind: str, parameters: Sequence[Tensor], batch: Any) -> Recording:
        calls: list[LoggedCall] = []
        take_step, num_gradients = getattr(self.function, kind), 0

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal num_gradients
            output = take_step(tensors[: len(parameters)], type(batch)(tensors[len(parameters) :]), 0)
            # The values belong to the trace; a replay puts its own in their place.
            calls[:], num_gradients = with_tensors(output.logged, repeat(torch.empty(0))), len(output.gradients)
            return (*output.gradients, output.loss, *tensors_of(output.logged), *output.buffers)

        self.check()
        inputs, is_elsewhere = [*parameters, *batch], parameters[0] is not self._layout.parameters[0]
        # The graph of an evaluation would keep the models of all its clients on the device.
        if takes_graph := takes_graphs(self._user.device) and is_elsewhere and self._name == "training_step":
            inputs = [each.clone(memory_format=torch.contiguous_format) for each in inputs]
        with preserved_globals(self._user.device), unchanged(self._module):
            replay, draws = record(flat, inputs, forbidden=self._layout.parameters)
            operations: Any = replay
            if takes_graph:
                replay = graph = GradientGraph(operations, inputs, num_gradients)
                operations = graph.operations  # it was recorded for other strides than those of a row's views
                if graph.obstacle is not None:
                    log.info(f"Recorded steps are not replayed as CUDA graphs: {graph.obstacle}.")
        self.check()
        # What other code of the user's has read is among them, which costs comparisons and no more
        self._reads_trainer |= bool(self._user.shim.reads)
        return Recording(replay, operations, calls, num_gradients, draws)

    def check(self) -> None:
        """Raise if a step is not all that happens in it.

        Raises:
            NotRecordableError: torch's hooks are registered on layers or parameters, a Metric was updated, or a buffer
                was made.
        """
        if has_torch_hooks(self._module):
            raise NotRecordableError("hooks are registered on its layers or parameters")
        if any(metric.update_called for metric in self._user.metrics):
            raise NotRecordableError("it updates a torchmetrics Metric")
        # What one client makes would serve those that are mapped with it, or come after it.
        filled = [each for each in self._user.scratch if each.initial is None and each.copy() is not None]
        if made := [*self._user.late_scratch(), *filled]:
            raise NotRecordableError(f"it makes the buffer '{made[0].full_name}' (which __init__ could make)")

    def _stop(self, reason: str, num_missed: int = 0) -> None:
        """Record no more; ``num_missed`` steps may have been replayed since the step was found to be as recorded."""
        self.reason, self.is_due = reason, False
        self._found.clear()
        name = f"{type(self._module).__name__}.{self._name}"
        if num_missed:
            rank_zero_warn(
                f"{name} does something else than when it was recorded: up to {num_missed} steps before this one may "
                "have missed the change. From here on it runs as written; trainer.record_steps: false does so from the "
                "start."
            )
            return
        log.info(
            f"{name} runs at its ordinary speed, because {reason}. Numbers stay the same and you need do nothing; only "
            'long runs of small models would be faster without it (see "Recorded steps" in docs/howto/many_clients.md).'
        )

    def _stop_late(self, found: Recording) -> None:
        # Nothing was replayed before the trials were over, so up to then all numbers are those of the step as written.
        missed = self._spacing(found) - 1 if found.num_compared >= NUM_TRIALS else 0
        self._stop("replayed, it gives other numbers than as written", missed)


def _form(batch: Any) -> tuple | None:
    """Return what a recording depends on of a batch; None unless it is a list of plain tensors."""
    if type(batch) not in (list, tuple) or not all(type(p) is Tensor and p.layout is torch.strided for p in batch):
        return None
    return type(batch), *[(part.shape, part.stride(), part.dtype) for part in batch]


def is_same(written: StepOutput, replayed: StepOutput, tolerance: float = 0.0) -> bool:
    """Return whether two outputs agree: bit for bit on a CPU, else to a fraction of each tensor's largest element.

    A gradient that is zero but for rounding, as that of a bias before BatchNorm, is compared with the largest of all.
    """
    pairs = list(zip(written.logged, replayed.logged, strict=False))
    if len(written.logged) != len(replayed.logged) or len(written.gradients) != len(replayed.gradients):
        return False
    if any((a.name, a.reduce_fx) != (b.name, b.reduce_fx) for a, b in pairs):
        return False
    values = [(written.loss, replayed.loss), *((a.value, b.value) for a, b in pairs)]
    values += ((a.batch_size, b.batch_size) for a, b in pairs)
    values += zip(written.buffers, replayed.buffers, strict=True)
    verdicts = [_is_near(a, b, tolerance) for a, b in values]
    gradients = list(zip(written.gradients, replayed.gradients, strict=True))
    floor = torch.stack([_largest(a) for a, _ in gradients]).max() / 10 if tolerance and gradients else 0.0
    verdicts += [_is_near(a, b, tolerance, floor) for a, b in gradients]
    # `read` waits once for the verdicts of a device, not once for each.
    return not any(verdict is False for verdict in verdicts) and all(read(verdicts))


def _largest(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0).abs().max() if values.numel() else values.new_zeros(())


def _is_near(a: Any, b: Any, tolerance: float, floor: Tensor | float = 0.0) -> bool | Tensor:
    """Return whether two values agree; the verdict of a device is returned as a tensor, without waiting for it."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel() or (a.device.type == "cpu" and torch.equal(a, b)):
        return True
    if a.device.type != "cpu":
        tolerance = max(tolerance, 1e-3)  # atomic additions of a GPU come in any order
    a, b = (value.to(wide_dtype(a.device)) for value in (a, b))
    scale = tolerance * _largest(a).clamp(min=floor)
    return ((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= scale)).all()


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put back what a trace leaves in a module and in plain containers and modules that it holds as attributes.

    Traced tensors have no values, so that the next step which reads one would fail.

    Raises:
        NotRecordableError: Something was changed, such as a mask that is kept for the last length.
    """
    owners = [*module.modules()]
    values = [value for owner in owners for value in attributes_of(owner).values()]
    inner: list[Any] = [value for value in values if type(value) in (dict, list, set)]
    items = [item for each in inner for item in (each.values() if type(each) is dict else each)]
    owners += [child for item in items if isinstance(item, nn.Module) for child in item.modules()]
    before = [*((owner, attributes_of(owner)) for owner in owners), *((each, each.copy()) for each in inner)]
    try:
        yield
    finally:
        changed = [pair for pair in before if not _holds_the_same(*pair)]
        for holder, held in changed:
            if isinstance(holder, nn.Module):
                for name in attributes_of(holder).keys() - held.keys():
                    del vars(holder)[name]
                vars(holder).update(held)
            else:
                holder.clear()
                holder.extend(held) if isinstance(holder, list) else holder.update(held)
    if changed:
        raise NotRecordableError("it changes what the module holds beside parameters and buffers")


def _holds_the_same(holder: Any, held: Any) -> bool:
    now = attributes_of(holder) if isinstance(holder, nn.Module) else holder
    ids = [[*map(id, (*each, *each.values()) if isinstance(each, dict) else each)] for each in (now, held)]
    return ids[0] == ids[1]


def has_torch_hooks(module: nn.Module) -> bool:
    """Return whether torch's hooks are registered on a module's layers or parameters."""
    has_own = any(getattr(child, name) for child in module.modules() for name in CALL_HOOKS)
    return has_own or any(map(is_hooked, module.parameters()))
