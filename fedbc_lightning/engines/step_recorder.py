"""When a step of the user's ``training_step`` may be replayed, and when it must be run."""

from __future__ import annotations

import io
import logging
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.plugins.precision import DoublePrecision, Precision
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torchmetrics import Metric

from fedbc_lightning.engines.recording import NotRecordableError, Replay, record
from fedbc_lightning.layout import ParameterLayout
from fedbc_lightning.seeding import preserved_globals

if TYPE_CHECKING:
    from fedbc_lightning.module import UserModule

log = logging.getLogger("lightning.pytorch." + __name__)

RECORD_AFTER = {"single": 500, "mapped": 60}
"""Steps of one shape that pay for recording it: 50 to 150 ms against 0.1 ms, or 1 ms for a mapped one, in each."""
MAX_RECORDINGS = 100
CLIENT_HOOKS = ("on_client_start", "on_client_end", "on_train_epoch_start", "on_train_epoch_end")
VARYING = frozenset({
    "current_epoch", "global_step", "current_client", "max_epochs", "max_steps", "estimated_stepping_batches",
    "num_training_batches", "callback_metrics", "optimizers", "lr_scheduler_configs", "strategy",
})  # fmt: skip
"""What ``self.trainer`` answers differently in another client or step."""


@dataclass
class LoggedCall:
    """One call of ``self.log`` inside a step; its value is a tensor, or a number that is always the same."""

    name: str
    value: Any
    reduce_fx: Any
    batch_size: int | None


@dataclass
class StepOutput:
    """What one step gives: the gradient of each grouped parameter, the loss, and what was logged.

    Mapped over clients, all tensors have K in front.
    """

    gradients: Sequence[Tensor]
    loss: Tensor
    logged: list[LoggedCall]


class Found(NamedTuple):
    """A recording, what it logs, and whether it draws random numbers."""

    replay: Replay
    calls: list[LoggedCall]
    draws: bool


class TrainingStep(nn.Module):
    """The user's ``training_step`` as a ``forward``, which ``functional_call`` wants."""

    def __init__(self, module: nn.Module, takes_index: bool) -> None:
        super().__init__()
        self.module, self._takes_index = module, takes_index
        self._training_step: Callable[..., Any] = module.training_step  # type: ignore[assignment]

    def forward(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        """What it returns."""
        return self._training_step(*((batch, batch_idx) if self._takes_index else (batch,)))


def tensors_of(calls: Sequence[LoggedCall]) -> list[Tensor]:
    """The values that are tensors."""
    return [call.value for call in calls if isinstance(call.value, Tensor)]


def with_tensors(calls: Sequence[LoggedCall], values: Iterable[Tensor]) -> list[LoggedCall]:
    """The calls with other tensors in the place of theirs."""
    tensors = iter(values)
    return [replace(call, value=next(tensors)) if isinstance(call.value, Tensor) else call for call in calls]


class LoggedCalls:
    """Takes ``self.log`` in place of the collector: the values are outputs of the step."""

    def __init__(self) -> None:
        self.calls: list[LoggedCall] = []

    def log(self, name: str, value: Any, *, reduce_fx: Any = "mean", batch_size: int | None = None) -> None:
        """Keep one call."""
        if isinstance(value, Metric):
            raise NotRecordableError(f"self.log('{name}') logs a Metric")
        if isinstance(value, Tensor):
            value = value.detach().reshape(())
        self.calls.append(LoggedCall(name, value, reduce_fx, batch_size))


class WatchedIndex(int):
    """A ``batch_idx`` that knows whether it was used for anything but being passed on."""

    is_used = False


def _used(name: str) -> Callable[..., Any]:
    def use(self: WatchedIndex, *args: Any) -> Any:
        WatchedIndex.is_used = True
        return getattr(int, name)(self, *args)

    return use


for _name in vars(int):
    if _name.startswith("__") and _name not in ("__new__", "__getattribute__", "__doc__"):
        setattr(WatchedIndex, _name, _used(_name))


class StepFunction:
    """One step as a function of parameters and batch, that leaves the module alone.

    Args:
        user: The user's module.
        layout: Of its parameters.
    """

    def __init__(self, user: UserModule, layout: ParameterLayout) -> None:
        self.user, self.layout = user, layout
        self._step = TrainingStep(user.module, user.training_takes_index)
        self._names = [f"module.{entry.name}" for entry in layout.entries]
        self._recurrent = [child for child in user.module.modules() if isinstance(child, nn.RNNBase)]

    def single(self, parameters: Sequence[Tensor], batch: Sequence[Tensor], batch_idx: int = 0) -> StepOutput:
        """Of one client: parameters as in the module.

        Raises:
            NotRecordableError: No loss, or a grouped parameter without a gradient.
        """
        leaves = [parameter.detach().requires_grad_() for parameter in parameters[: self.layout.num_grouped]]
        with torch.enable_grad():
            loss, logged = self._call([*leaves, *parameters[self.layout.num_grouped :]], batch, batch_idx)
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        for entry, gradient in zip(self.layout.entries, gradients, strict=False):
            if gradient is None:
                raise NotRecordableError(f"'{entry.name}' has no gradient")
        return StepOutput(gradients, loss.detach(), logged)

    def mapped(self, parameters: Sequence[Tensor], batch: Sequence[Tensor], batch_idx: int = 0) -> StepOutput:
        """Of K clients: every tensor with K in front.

        Raises:
            NotRecordableError: No loss.
        """
        num_grouped = self.layout.num_grouped
        calls: list[LoggedCall] = []

        def loss_of(leaves: Sequence[Tensor], others: Sequence[Tensor], batch: Sequence[Tensor]) -> tuple:
            loss, logged = self._call([*leaves, *others], batch, batch_idx)
            calls[:] = logged
            return loss, (loss.detach(), tensors_of(logged))

        step = vmap(grad(loss_of, has_aux=True), randomness="different")
        gradients, (losses, values) = step(list(parameters[:num_grouped]), list(parameters[num_grouped:]), batch)
        return StepOutput(gradients, losses, with_tensors(calls, values))

    def _call(
        self, parameters: Sequence[Tensor], batch: Sequence[Tensor], batch_idx: int
    ) -> tuple[Tensor, list[LoggedCall]]:
        collector, calls = self.user.collector, LoggedCalls()
        self.user.collector = calls  # type: ignore[assignment]
        try:
            with self.user.autocast():
                output = functional_call(
                    self._step, dict(zip(self._names, parameters, strict=True)), (batch, batch_idx)
                )
        finally:
            self.user.collector = collector
            for layer in self._recurrent:  # these keep a list of their weights, which functional_call does not put back
                layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise NotRecordableError("training_step returns no loss")
        return loss.reshape(()), calls.calls


class StepRecorder:
    """Replays steps whose shapes came often; the numbers are those of the module's own step, bit for bit on a CPU.

    A recording holds what ``training_step`` did once, so what it does must be a function of parameters and batch. That
    is watched: a step that uses ``batch_idx``, reads ``self.trainer`` where that varies, changes the module, updates a
    Metric, draws from ``random`` or NumPy, prints, or looks at the value of a tensor is not recorded. Whatever else of
    the module (or of what ``self.trainer`` answered) changed between rounds ends the recordings, and the first replayed
    step of every round is also run as written and compared.

    Args:
        user: The user's module.
        layout: Of its parameters.

    Attributes:
        reason: Why steps are not recorded; None: they are.
    """

    def __init__(self, user: UserModule, layout: ParameterLayout) -> None:
        self._user, self._module = user, user.module
        self.function = StepFunction(user, layout)
        self.record_after = RECORD_AFTER
        self._counts: dict[tuple, int] = {}
        self._found: dict[tuple, Found] = {}
        self._num_gradients = layout.num_grouped
        self._reads: set[str] = set()
        self._state: Any = None
        self._observed: Any = None
        self._round, self._is_checked = -1, False
        self.reason: str | None = None
        if layout.float_buffers or layout.integer_buffers:
            self.reason = "it moves buffers"
        elif type(user.precision) not in (Precision, DoublePrecision):
            self.reason = f"precision {user.precision.precision}"
        elif any(map(user.hooks.listens, CLIENT_HOOKS)):
            self.reason = "hooks are called between clients"

    def start(self, round: int) -> None:
        """A client or cohort starts in this round: once a round, drop the recordings if the module has changed."""
        if round == self._round:
            return
        self._round, self._is_checked = round, False
        if self._found and (self._describe_module(), self._describe_reads()) != self._state:
            self._found.clear()
            self._counts.clear()

    def step(self, kind: str, parameters: Sequence[Tensor], batch: Any) -> StepOutput | None:
        """The replayed step, or None: there is no recording for such a batch (yet), so it is to be run as written.

        Args:
            kind: ``"single"`` or ``"mapped"``, see :class:`StepFunction`.
            parameters: As the kind wants them.
            batch: One batch, or K.
        """
        if self.reason is not None:
            return None
        try:
            key = (kind, type(batch), *[(t.shape, t.stride(), t.dtype) for t in batch])
        except AttributeError:  # not all are tensors
            return None
        found = self._found.get(key)
        if found is None:
            count = self._counts[key] = self._counts.get(key, 0) + 1
            if count == self.record_after[kind]:
                self._observed = self._describe_module()  # the caller's next step is looked at, then recorded
            if (
                count <= self.record_after[kind]
                or len(self._found) >= MAX_RECORDINGS
                or type(batch) not in (list, tuple)
            ):
                return None
            found = self._record(kind, parameters, batch)
            if found is None:
                return None
            self._found[key] = found
        return (
            self._replay(found, parameters, batch)
            if self._is_checked
            else self._checked(kind, found, parameters, batch)
        )

    def take_watched(self, kind: str, parameters: Sequence[Tensor], batch: Any) -> StepOutput:
        """A step as written that must not do anything which is not a function of parameters and batch.

        Raises:
            NotRecordableError: It does, with what it is.
        """
        for metric in self._user.metrics:
            metric.reset()
        with self._watched():
            output = getattr(self.function, kind)(parameters, batch, WatchedIndex())
            if any(metric.update_called for metric in self._user.metrics):
                raise NotRecordableError("it updates a torchmetrics Metric")
        return output

    def _replay(self, found: Found, parameters: Sequence[Tensor], batch: Any) -> StepOutput:
        calls = found.calls
        with torch.no_grad():
            results = found.replay(*parameters, *batch)
        first = self._num_gradients
        return StepOutput(results[:first], results[first], calls and with_tensors(calls, results[first + 1 :]))

    def _record(self, kind: str, parameters: Sequence[Tensor], batch: Any) -> Found | None:
        calls: list[LoggedCall] = []
        take_step = getattr(self.function, kind)

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            output = take_step(tensors[: len(parameters)], type(batch)(tensors[len(parameters) :]), WatchedIndex())
            calls[:] = with_tensors(output.logged, repeat(torch.empty(0)))  # theirs go with the recording
            return (*output.gradients, output.loss, *tensors_of(output.logged))

        try:
            if _has_hooks(self._module):
                raise NotRecordableError("hooks are registered on its layers or parameters")
            if self._observed != self._describe_module():
                raise NotRecordableError("it changes the module")
            if any(metric.update_called for metric in self._user.metrics):
                raise NotRecordableError("it updates a torchmetrics Metric")
            with preserved_globals(self._user.device), self._watched():
                replay, draws = record(flat, [*parameters, *batch])
        except NotRecordableError as error:
            self._stop(str(error))
            return None
        self._state = self._describe_module(), self._describe_reads()
        return Found(replay, calls, draws)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise if the step does anything that a recording would leave out; give the module back as it was.

        Raises:
            NotRecordableError: It does, with what it is.
        """
        shim, before = self._user.shim, self._describe_module()
        attributes = [(vars(child), dict(vars(child))) for child in self._module.modules()]
        random_before = _generators()
        shim.reads.clear()
        WatchedIndex.is_used = False
        printed = io.StringIO()
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(out, printed), _Tee(err, printed)
        try:
            yield
            random_after = _generators()
            varying = ", ".join(sorted(shim.reads & VARYING))
            problems = {
                "it uses batch_idx": WatchedIndex.is_used,
                f"it reads self.trainer.{varying}": bool(varying),
                "it reads self.logger": bool(shim.reads & {"logger", "loggers"}),
                "it draws from random or numpy.random": random_before != random_after,
                "it prints": bool(printed.getvalue()),
                "it changes the module": before != self._describe_module(),
            }
            problem = next((problem for problem, is_there in problems.items() if is_there), None)
            if problem is not None:
                raise NotRecordableError(problem)
        finally:
            sys.stdout, sys.stderr = out, err
            self._reads |= shim.reads
            for now, then in attributes:
                now.clear()
                now.update(then)

    def _describe_module(self) -> Any:
        """But for Metrics, which evaluation moves, and which a recorded step does not update."""
        in_metrics = {id(m) for metric in self._user.metrics for m in metric.modules()}
        modules = [m for m in self._module.modules() if id(m) not in in_metrics]
        return tuple((id(m), _describe(_own_attributes(m), 4)) for m in modules)

    def _describe_reads(self) -> Any:
        values = self._user.shim.__dict__["_values"]
        return tuple((name, _describe(values.get(name), 3)) for name in sorted(self._reads))

    def _checked(self, kind: str, found: Found, parameters: Sequence[Tensor], batch: Any) -> StepOutput | None:
        """Also run the step as written, or of a mapped one without draws its first client, and compare."""
        self._is_checked = True
        of_first = kind == "mapped" and not found.draws
        with preserved_globals(self._user.device):
            if of_first:
                first = [parameter[0] for parameter in parameters]
                expected = self.function.single(first, type(batch)(part[0] for part in batch))
            else:
                expected = getattr(self.function, kind)(parameters, batch)
        try:
            replayed = self._replay(found, parameters, batch)
        except Exception as error:  # some kernels cannot be called as they were traced
            self._stop((str(error).splitlines() or [type(error).__name__])[0])
            return None if of_first else expected
        numbers = [call.value for call in expected.logged if not isinstance(call.value, Tensor)]
        is_same = numbers == [call.value for call in replayed.logged if not isinstance(call.value, Tensor)]
        tensors = [[*step.gradients, step.loss, *tensors_of(step.logged)] for step in (expected, replayed)]
        if of_first:
            tensors[1] = [tensor[0] for tensor in tensors[1]]
        if is_same and len(tensors[0]) == len(tensors[1]) and all(map(_close, *tensors)):
            return replayed
        self._stop("what it does has changed since it was recorded")
        return None if of_first else expected

    def _stop(self, reason: str) -> None:
        self.reason = reason
        self._found.clear()
        name = type(self._module).__name__
        log.info(f"{name}.training_step runs as written in every step and is not recorded: {reason}.")


class _Tee(io.TextIOBase):
    def __init__(self, *files: Any) -> None:
        self._files = files

    def write(self, text: str) -> int:
        for file in self._files:
            file.write(text)
        return len(text)


def _generators() -> tuple:
    """Where Python's and NumPy's global generators stand."""
    _, keys, *position = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), position


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two results of the same operations agree, but for the order of sums and the atomics of a GPU."""
    scale = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
    tolerance = 1e-5 if a.device.type == "cpu" else 1e-3
    return torch.allclose(a, b.to(a.dtype), rtol=0.0, atol=tolerance * scale + 1e-7, equal_nan=True)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(child, name) for child in module.modules() for name in _HOOKS) or any(
        p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters()
    )


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    left = {"_parameters", "_trainer", "_fabric", "log", "_flat_weight_refs"}
    return {name: value for name, value in vars(module).items() if name not in left}


def _describe(value: Any, depth: int) -> Any:
    """A value by its content as far as that is cheap, so that two descriptions differ where the value has changed."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.nbytes <= 4096 else None
    if depth == 0 or isinstance(value, (nn.Module, type, *FUNCTIONS)):
        return id(value)
    if isinstance(value, dict):
        return len(value), tuple((_describe(k, 1), _describe(v, depth - 1)) for k, v in list(value.items())[:1000])
    if isinstance(value, (list, tuple)):
        return len(value), tuple(_describe(item, depth - 1) for item in value[:1000])
    if isinstance(value, (set, frozenset)):
        return len(value), tuple(sorted(map(repr, value))[:1000])
    return id(value), _describe(vars(value), depth - 1) if hasattr(value, "__dict__") else None
