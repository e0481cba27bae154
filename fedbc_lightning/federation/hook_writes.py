"""Writes of hooks into weights and buffers; between clients they become part of z, because Lightning keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.state import WrittenParametersError

# Hooks whose writes change the initial model
START_HOOKS = ("setup", "on_fit_start", "on_train_start")


class Weights(NamedTuple):
    """Holds copies of a module's parameters and buffers at one moment.

    Attributes:
        parameters: The trainable parameters, (d,).
        buffers: The floating-point buffers, (b,).
        counters: The integer buffers.
        kept: The parameters that stay with each client, (p,).
        frozen: The parameters that are not trained.
    """

    parameters: Tensor
    buffers: Tensor
    counters: Tensor
    kept: Tensor
    frozen: list[Tensor]

    @classmethod
    def of(cls, federation: Federation, *, with_frozen: bool = False) -> Weights:
        """Copy the parameters and buffers of a federation's module; frozen parameters only ``with_frozen``."""
        layout = federation.layout
        frozen = [parameter.detach().clone() for parameter in layout.frozen.parameters] if with_frozen else []
        return cls(layout.read(), layout.read_buffers(), layout.read_counters(), layout.read_kept(), frozen)

    def differs_from(self, other: Weights) -> bool:
        """Return whether the trainable parameters or the buffers are different."""
        pairs = list(zip(self[:3], other[:3], strict=True))
        if self.kept.numel():  # mostly empty, and a comparison waits for the device
            pairs.append((self.kept, other.kept))
        return not all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def of_process_0(self, federation: Federation) -> Weights:
        """Return the values of process 0, on every process."""
        if federation.fabric.world_size == 1:
            return self
        sent = federation.fabric.broadcast([tensor.cpu() for tensor in (*self[:4], *self.frozen)])
        parameters, buffers, counters, kept, *frozen = (tensor.to(self.parameters.device) for tensor in sent)
        return Weights(parameters, buffers, counters, kept, frozen)


@contextmanager
def kept_from_start_hooks(federation: Federation, *, is_resumed: bool) -> Iterator[None]:
    """Take what hooks inside this context write into the module as the initial model.

    In a resumed run the model of the checkpoint is restored instead. Values that no checkpoint holds, such as buffers
    with ``persistent=False``, are those that the hooks wrote in either case.

    Args:
        federation: The federation, whose state is made anew if a hook wrote into the module.
        is_resumed: Whether the run continues from a checkpoint.

    Raises:
        ConfigurationError: A hook added or replaced parameters instead of writing into them, or froze or thawed some.
    """
    # Copies of all weights are taken only if some hook could write: they cost memory and time.
    is_heard = any(map(federation.user.hooks.listens, START_HOOKS))
    before = Weights.of(federation, with_frozen=is_resumed and is_heard)
    yield
    if is_heard:
        federation.layout.check_replaced(at_start=True)
    after = Weights.of(federation, with_frozen=not is_resumed and federation.fabric.world_size > 1)
    federation.bench.attach()  # a hook may have given a parameter other .data, which detaches it from the row
    _share_scratch(federation)
    if is_resumed:
        federation.layout.frozen.write(before.frozen)
        federation.load_global()
        if after.differs_from(before):
            rank_zero_info(
                "Resumed: the weights and buffers are those of the checkpoint; what hooks wrote into them at the start "
                "(on_fit_start, on_train_start) is not taken again."
            )
    # One rank alone may have written, e.g. in a hook behind is_global_zero; all take rank 0's values.
    elif any(gather_objects(federation.fabric, after.differs_from(before))) or federation.fabric.world_size > 1:
        after = after.of_process_0(federation)
        federation.layout.frozen.write(after.frozen)
        federation.make_state(*after[:4])
        federation.load_global()
    federation.layout.frozen.mark()
    federation.layout.check_trainable()


@contextmanager
def kept_from_round_hooks(federation: Federation, hook: str) -> Iterator[None]:
    """Take what the hook inside this context writes into the module as part of z; a rollback undoes it."""
    if not federation.user.hooks.listens(hook):
        yield
        return
    before, scratch = Weights.of(federation), [buffer.clone() for buffer, _ in federation.user.scratch]
    yield
    after = Weights.of(federation)
    _say_that_scratch_is_put_back(federation, hook, scratch)
    if not any(gather_objects(federation.fabric, after.differs_from(before))):
        return
    after = after.of_process_0(federation)
    server = federation.server
    for name, was, now in zip(("z", "buffers", "counters"), before[:3], after[:3], strict=True):
        # Elements that were not written keep the server's value: under half precision the module holds z rounded.
        server.replace(name, torch.where(now == was, server[name], now))
    federation.load_global()


@contextmanager
def not_kept_from_evaluation_hooks(federation: Federation, evaluator: Evaluator, *hooks: str) -> Iterator[None]:
    """Log once per run if hooks inside this context write into the module: it is neither evaluated nor kept."""
    listens = federation.user.hooks.listens
    if evaluator.has_told_writes or not any(map(listens, hooks)):
        yield
        return
    before = Weights.of(federation)
    yield
    if Weights.of(federation).differs_from(before):
        evaluator.has_told_writes = True
        rank_zero_info(
            f"model: {', '.join(filter(listens, hooks))} wrote into weights or buffers: that is neither "
            "evaluated nor kept, because an evaluation measures the models that server and clients have. To change the "
            "global model, write into it in on_round_end (said once)."
        )


def begin_again(federation: Federation, error: WrittenParametersError, frozen: dict[str, Tensor]) -> None:
    """Go back to the beginning of a first round that wrote frozen parameters, and make them buffers.

    Args:
        federation: The federation, in which no round is committed yet.
        error: The error that names the parameters.
        frozen: Values of the frozen parameters before the round, from ``FrozenParameters.copies``.

    Raises:
        WrittenParametersError: Not all of the parameters were copied before the round.
    """
    if not set(error.names) <= frozen.keys():
        raise error
    federation.rollback()
    federation.layout.frozen.put_back(frozen)
    federation.take_as_buffers(error.names)
    federation.load_global()
    more = f" and {len(error.names) - 1} more" if len(error.names) > 1 else ""
    rank_zero_info(
        f"model: training writes '{error.names[0]}'{more}, which have requires_grad=False, as momentum and teacher "
        "networks do: they travel as buffers do (trainer.buffers), and the first round begins again."
    )


def _say_that_scratch_is_put_back(federation: Federation, hook: str, before: Sequence[Tensor]) -> None:
    """Say once that what a hook of rounds wrote into buffers that do not travel has no effect."""
    user = federation.user
    written = [now for (now, _), then in zip(user.scratch, before, strict=True) if not torch.equal(now, then)]
    names = [name for name, buffer in user.module.named_buffers() if any(buffer is now for now in written)]
    if names:
        federation.bench.say(
            f"model: {hook} wrote into '{names[0]}', a buffer with persistent=False: each client finds there what it "
            "held when training began. Register it with persistent=True, and what is written becomes part of the "
            "global model (said once)."
        )


def _share_scratch(federation: Federation) -> None:
    """Let every client start with the present values, in process 0, of the buffers that are not exchanged."""
    user = federation.user
    user.keep_scratch()
    if federation.fabric.world_size > 1 and user.scratch:
        values = federation.fabric.broadcast([initial.cpu() for _, initial in user.scratch])
        for (buffer, _), value in zip(user.scratch, values, strict=True):
            buffer.copy_(value)
        user.keep_scratch()
