"""A step of the user's module as a function of weights and batch: for one client, for K clients, or as written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torchmetrics import Metric

from fedbc_lightning.core.private_torch import buffers_of, leaves_of, parameters_of, renew_flat_weights
from fedbc_lightning.engines.recorded.recording import NotRecordableError
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.collector import MetricCollector, one_number
from fedbc_lightning.module.mistakes import refuse_loss
from fedbc_lightning.state.layout import ParameterLayout


@dataclass
class LoggedCall:
    """One call of ``self.log`` inside a step; in a recording, only its tensors differ between steps."""

    name: str
    value: Any
    reduce_fx: Any
    batch_size: Any


@dataclass
class StepOutput:
    """The result of one step: the gradient of each parameter in the optimizer, the loss, what was logged, and buffers.

    If the step was mapped over K clients, all tensors have K in front.
    """

    gradients: Sequence[Tensor]
    loss: Tensor
    logged: list[LoggedCall]
    buffers: Sequence[Tensor] = ()


def tensors_of(calls: Sequence[LoggedCall]) -> list[Tensor]:
    """Return the values of logged calls that are tensors."""
    return [call.value for call in calls if isinstance(call.value, Tensor)]


def with_tensors(calls: Sequence[LoggedCall], values: Iterable[Tensor]) -> list[LoggedCall]:
    """Return the calls with the given tensors in place of their own."""
    tensors = iter(values)
    return [replace(call, value=next(tensors)) if isinstance(call.value, Tensor) else call for call in calls]


def log_replayed(
    collector: MetricCollector, calls: Sequence[LoggedCall], rows: Sequence[Sequence[Tensor]], size: int
) -> None:
    """Give a collector what replayed steps have logged.

    Args:
        collector: The collector.
        calls: The calls of each step.
        rows: The tensors in the calls of each step.
        size: Number of samples of each step's batch.
    """
    if len({call.name for call in calls}) < len(calls):  # values of one name are added in the order of the steps
        for call in [call for row in rows for call in with_tensors(calls, row)]:
            weight = size if call.batch_size is None else call.batch_size
            collector.log(call.name, call.value, reduce_fx=call.reduce_fx, batch_size=weight)
        return
    columns = zip(*rows, strict=True)
    for call in calls:
        values = next(columns) if isinstance(call.value, Tensor) else (call.value,) * len(rows)
        weight = size if call.batch_size is None else call.batch_size
        collector.log_all(call.name, values, reduce_fx=call.reduce_fx, batch_size=weight)


class LoggedCalls:
    """Keeps the calls of ``self.log``; it stands in the place of the module's collector.

    Args:
        collector: Collector that is given the calls as well, or None.
    """

    dataloader_idx: int | None = None

    def __init__(self, collector: Any = None) -> None:
        self.calls: list[LoggedCall] = []
        self._collector = collector

    def log(self, name: str, value: Any, *, reduce_fx: Any, batch_size: int | Tensor | None, shown: tuple = ()) -> None:
        """Keep one call of ``self.log``."""
        if self._collector is not None:
            self._collector.log(name, value, reduce_fx=reduce_fx, batch_size=batch_size, shown=shown)
        elif isinstance(value, Metric) or isinstance(batch_size, Tensor):
            raise NotRecordableError(f"self.log('{name}') logs a Metric, or with a batch_size that is a tensor")
        else:
            value = one_number(name, value)
        if isinstance(value, Tensor):
            value = value.detach().reshape(()).clone()  # the step may go on to change it in place
        self.calls.append(LoggedCall(name, value, reduce_fx, batch_size))


@contextmanager
def collecting(user: UserModule, collector: Any) -> Iterator[None]:
    """Let a collector take what ``self.log`` logs inside."""
    before, user.collector = user.collector, collector
    try:
        yield
    finally:
        user.collector = before


class Step(nn.Module):
    """Calls a step of a module in its ``forward``, because ``torch.func.functional_call`` calls nothing else."""

    def __init__(self, module: nn.Module, layout: ParameterLayout, name: str, takes_index: bool) -> None:
        super().__init__()
        self.module, self._layout, self._takes_index, self._step = module, layout, takes_index, name

    def forward(self, batch: Sequence[Tensor], batch_idx: int) -> tuple[Any, list[Tensor]]:
        """Return what the step returns, and the buffers that it leaves, which are no others after this call."""
        step = getattr(self.module, self._step)  # which a callback may have replaced
        return step(*((batch, batch_idx) if self._takes_index else (batch,))), self._layout.buffers()


class StepFunction:
    """Evaluates a step as a function of parameters, buffers and batch, and leaves the module as it was.

    Where it takes parameters, those of the module come first, in the order of a row, and then its persistent buffers.

    Args:
        user: The user's module.
        layout: The layout of its parameters.
        name: Name of the step, such as ``training_step``.
    """

    def __init__(self, user: UserModule, layout: ParameterLayout, name: str = "training_step") -> None:
        self.user, self.layout = user, layout
        self._step = Step(user.module, layout, name, user.takes_index[name])

    def single(self, parameters: Sequence[Tensor], batch: Sequence[Tensor], batch_idx: int = 0) -> StepOutput:
        """Take the step of one client.

        Args:
            parameters: The parameters and buffers, shaped as in the module.
            batch: The batch.
            batch_idx: Number of the batch.

        Raises:
            NotRecordableError: There is no loss, or a parameter of the optimizer has no gradient.
        """
        leaves = [parameter.detach().requires_grad_() for parameter in parameters[: self.layout.num_grouped]]
        with torch.enable_grad():
            loss, logged, buffers = self._call([*leaves, *parameters[self.layout.num_grouped :]], batch, batch_idx)
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return StepOutput(self._complete(gradients), loss.detach(), logged, buffers)

    def mapped(self, parameters: Sequence[Tensor], batch: Sequence[Tensor], batch_idx: int = 0) -> StepOutput:
        """Take the step of K clients at once; every tensor has K in front.

        Args:
            parameters: The parameters and buffers of the clients.
            batch: The batches of the clients.
            batch_idx: Number of the batch.

        Raises:
            NotRecordableError: There is no loss.
        """
        num_grouped = self.layout.num_grouped
        calls: list[LoggedCall] = []

        def loss_of(leaves: Sequence[Tensor], others: Sequence[Tensor], batch: Sequence[Tensor]) -> tuple:
            loss, logged, buffers = self._call([*leaves, *others], batch, batch_idx)
            calls[:] = logged
            return loss, (loss.detach(), tensors_of(logged), buffers)

        step = vmap(grad(loss_of, has_aux=True), randomness="different")
        parts = list(parameters[:num_grouped]), list(parameters[num_grouped:])
        gradients, (losses, values, buffers) = step(*parts, batch)
        return StepOutput(gradients, losses, with_tensors(calls, values), buffers)

    def mapped_evaluation(self, parameters: Sequence[Tensor], batch: Sequence[Tensor], *_: int) -> StepOutput:
        """Take a validation or test step of K models at once, without gradients, each on its own batch.

        Args:
            parameters: The parameters of the clients; every tensor has K in front.
            batch: The batches of the clients.

        Returns:
            What was logged; 0 stands for the loss, which there is not.

        Raises:
            NotRecordableError: The step logs something else than numbers.
        """
        return self._evaluated(0, parameters, batch)

    def shared_evaluation(self, parameters: Sequence[Tensor], batch: Sequence[Tensor], *_: int) -> StepOutput:
        """Take such a step of one model on the batches of K clients; see :meth:`mapped_evaluation`."""
        return self._evaluated(None, parameters, batch)

    def _evaluated(self, dim: int | None, parameters: Sequence[Tensor], batch: Sequence[Tensor]) -> StepOutput:
        calls: list[LoggedCall] = []

        def logged(parameters: list[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
            calls[:] = self._logged(parameters, batch, 0)[1]
            return tensors_of(calls)

        # An evaluation that draws numbers would give each client other ones than alone; vmap refuses it.
        values = vmap(logged, in_dims=(dim, 0), randomness="error")(list(parameters), batch)
        return StepOutput((), parameters[0].new_zeros(()), with_tensors(calls, values))

    def written(self, batch: Sequence[Tensor], batch_idx: int = 0) -> StepOutput:
        """Take the module's step as it is written, on its own parameters, which are left without gradients.

        Buffers are put back to what they were.

        Raises:
            NotRecordableError: There is no loss, a parameter has no gradient, or what is no parameter has one.
        """
        calls, before = LoggedCalls(), (self.layout.read_buffers(), self.layout.read_counters())
        self.layout.drop_gradients()
        try:
            with collecting(self.user, calls), torch.enable_grad():
                loss, _ = self.user.training_step(batch, batch_idx)
                if loss is None:
                    raise NotRecordableError("training_step returns no loss")
                refuse_loss(loss, self.user.module)
                self.check_leaves(loss)
                loss.backward()
            gradients = [parameter.grad for parameter in self.layout.parameters[: self.layout.num_grouped]]
            buffers = [buffer.clone() for buffer in self.layout.buffers()]
        finally:
            self.layout.drop_gradients()
            self.layout.write_buffers(*before)
        return StepOutput(self._complete(gradients), loss.detach().reshape(()), calls.calls, buffers)

    def check_leaves(self, loss: Tensor) -> None:
        """Raise if ``loss.backward()`` would give a gradient to a tensor that is no parameter of the module.

        Raises:
            NotRecordableError: It would: such as to a learned temperature in a dict.
        """
        own = set(map(id, self.layout.parameters))
        if not own.issuperset(map(id, leaves_of(loss))):
            raise NotRecordableError("its loss has a gradient for a tensor that is no parameter of the module")

    def _complete(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients, if every parameter of the optimizer has one."""
        found = [gradient for gradient in gradients if gradient is not None]
        if len(found) < len(gradients):
            name = self.layout.entries[[gradient is None for gradient in gradients].index(True)].name
            raise NotRecordableError(f"'{name}' has no gradient")
        return found

    def _call(
        self, parameters: Sequence[Tensor], batch: Sequence[Tensor], batch_idx: int
    ) -> tuple[Tensor, list[LoggedCall], list[Tensor]]:
        """Return the loss of a step, what it logged, and the buffers that it leaves."""
        (output, buffers), calls = self._logged(parameters, batch, batch_idx)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise NotRecordableError("training_step returns no loss")
        forms = [[(b.shape, b.dtype) for b in of] for of in (parameters[len(self.layout.entries) :], buffers)]
        if forms[0] != forms[1]:
            raise NotRecordableError("it changes the shape or dtype of a buffer")
        return loss.reshape(()), calls, [buffer.detach() for buffer in buffers]

    def _logged(
        self, parameters: Sequence[Tensor], batch: Sequence[Tensor], batch_idx: int
    ) -> tuple[Any, list[LoggedCall]]:
        """Return what a step returns with the buffers that it leaves, and what it logs."""
        calls, num_entries = LoggedCalls(), len(self.layout.entries)
        children = list(self.user.module.modules())
        before = [(dict(parameters_of(child)), dict(buffers_of(child))) for child in children]
        names = [*(entry.name for entry in self.layout.entries), *self.layout.buffer_names]
        # A step writes into its buffers in place: what it was given must stay.
        given = [*parameters[:num_entries], *(buffer.clone() for buffer in parameters[num_entries:])]
        named = {f"module.{name}": tensor for name, tensor in zip(names, given, strict=False)}
        try:
            with collecting(self.user, calls), self.user.autocast():
                output = functional_call(self._step, named, (batch, batch_idx))
        finally:
            for child, (parameters_before, buffers_before) in zip(children, before, strict=True):
                # torch does not restore a child that has two names
                parameters_of(child).update(parameters_before)
                buffers_of(child).update({k: buffer for k, buffer in buffers_before.items() if buffer is not None})
                if isinstance(child, nn.RNNBase):  # RNNs keep a list of their weights beside the names
                    renew_flat_weights(child)
        return output, calls.calls
