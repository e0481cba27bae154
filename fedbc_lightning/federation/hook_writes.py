"""Writes of hooks into weights and buffers; between clients they become part of z, because Lightning keeps them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain

import torch
from lightning.fabric import Fabric
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.text import shorten
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.evaluation.measurement import Models
from fedbc_lightning.federation import checkpoint_content
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.state import Weights, WrittenParametersError
from fedbc_lightning.state.layout import is_same

# Hooks whose writes change the initial model
START_HOOKS = ("on_fit_start", "on_train_start")


@contextmanager
def kept_from_start_hooks(federation: Federation, *, is_resumed: bool) -> Iterator[None]:
    """Take what hooks inside this context write into the module as the initial model.

    In a resumed run the model of the checkpoint is restored instead. Values that no checkpoint holds, such as buffers
    with ``persistent=False``, are those that the hooks wrote in either case.

    Args:
        federation: The federation, whose state is made anew if a hook wrote into the module.
        is_resumed: Whether the run continues from a checkpoint.

    Raises:
        ConfigurationError: A hook added or replaced parameters instead of writing into them, or thawed some.
    """
    # Copies of all weights are taken only if some hook could write: they cost memory and time.
    heard = [name for name in START_HOOKS if federation.user.hooks.is_heard(name)]
    layout, fabric = federation.layout, federation.fabric
    before = [layout.weights()] if heard else []
    frozen = layout.frozen.copies(of_all=True) if is_resumed and heard else {}
    settings = copy.deepcopy(checkpoint_content.set_by_hooks(federation)) if is_resumed else {}
    with _taking_settings(federation, ", ".join(heard)):
        yield
    if heard:
        layout.check_replaced(at_start=True)
    after = layout.weights()
    is_written = any(map(after.differ_from, before))
    federation.bench.attach()  # a hook may have given a parameter other .data, which detaches it from the row
    _share_scratch(federation)
    if is_resumed:
        layout.frozen.put_back(frozen)
        federation.load_global()
        is_other = checkpoint_content.set_by_hooks(federation) != settings
        checkpoint_content.put_back(federation, settings)
        if is_written or is_other:
            rank_zero_info(
                "Resumed: weights, buffers, modes and the optimizer's options are those of the checkpoint; what hooks "
                "wrote into them at the start (on_fit_start, on_train_start) is not taken again."
            )
    # One rank alone may have written, e.g. in a hook behind is_global_zero; all take rank 0's values.
    elif fabric.world_size > 1 or is_written:
        frozen = layout.frozen.copies(of_all=True) if fabric.world_size > 1 else {}
        layout.frozen.put_back(dict(zip(frozen, _of_process_0(fabric, [*frozen.values()]), strict=True)))
        federation.make_state(Weights(*_of_process_0(fabric, after)))
        federation.load_global()
    layout.frozen.mark()
    layout.check_finite()


@contextmanager
def kept_from_round_hooks(federation: Federation, hook: str) -> Iterator[None]:
    """Take what the hook inside this context writes into the module as part of z; a rollback undoes it."""
    if not federation.user.hooks.is_heard(hook):
        yield
        return
    before, scratch = federation.layout.weights(), [each.copy() for each in federation.user.scratch]
    with _taking_settings(federation, hook), federation.user.noting_attributes():
        yield
    _say_that_scratch_is_put_back(federation, hook, scratch)
    _take_written(federation, before)


def _take_written(federation: Federation, before: Weights) -> None:
    """Take what differs from weights before as part of z."""
    after = federation.layout.weights()
    if not any(gather_objects(federation.fabric, after.differ_from(before))):
        return
    server, written = federation.server, _of_process_0(federation.fabric, after)
    for name, was, now in zip(("z", "buffers", "counters"), before[:3], written[:3], strict=True):
        # Elements that were not written keep the server's value: under half precision the module holds z rounded.
        server.replace(name, torch.where(now == was, server[name], now))
    federation.load_global()


@contextmanager
def _taking_settings(federation: Federation, hook: str, *, modes: bool = True) -> Iterator[None]:
    """Let clients begin with the modes, frozen layers and options of the optimizer that hooks in this context leave."""
    optimizer, layout = federation.bench.optimizer, federation.layout
    layout.put_frozen_back()
    if modes:
        federation.user.train_mode()
    with optimizer.taking_writes(hook) if hook else nullcontext():
        yield
    if modes:
        federation.user.keep_modes()
    layout.check_thawed(hook)
    layout.frozen_by_hooks = layout.frozen_now()  # so every client begins
    if layout.frozen_by_hooks:
        _check_frozen(federation, hook, min(layout.frozen_by_hooks))


def _check_frozen(federation: Federation, hook: str, name: str) -> None:
    """Raise if something else than gradients would move a layer that a hook has frozen, else say what it costs."""
    what, elsewhere = f"model: {hook} froze '{name}'", "freeze it in __init__, setup or configure_model"
    if federation.engine.has_solver or federation.channel.parts:
        why = "the method takes steps of its own" if federation.engine.has_solver else "the channel changes messages"
        raise ConfigurationError(f"{what}, which is exchanged all the same, and {why}, also there; {elsewhere}.")
    federation.bench.say(f"{what}, which is exchanged all the same, as it may thaw. If it never does, {elsewhere}.")


class AroundEvaluation:
    """Lets what hooks around an evaluation write into the module be the global model that is evaluated.

    The module holds what they wrote whenever they run, so that a callback that puts other weights in for an evaluation
    finds them there to take them out again; between them and afterwards it holds z. What else they set holds for every
    client from then on, as with hooks of rounds; but modes are put back, as by Lightning.

    Args:
        federation: The federation.
        is_fit: Whether clients are trained.
    """

    def __init__(self, federation: Federation, *, is_fit: bool) -> None:
        self._federation, self._is_fit = federation, is_fit
        self._written: Weights | None = None
        self._frozen: dict[str, Tensor] = {}

    @contextmanager
    def calling(self, *hooks: str) -> Iterator[None]:
        """Note what these hooks, which are called in this context, write into the module."""
        federation, layout, frozen = self._federation, self._federation.layout, self._federation.layout.frozen
        # Copies and a comparison of all weights, for which a GPU waits, are made only if some hook could write.
        heard = ", ".join(filter(federation.user.hooks.is_heard, hooks))
        if not heard:
            yield
            return
        z, kept, was_written = layout.weights(), frozen.copies(), bool(frozen.written())  # by hooks of rounds
        if self._written is not None:
            values = self._written
            federation.bench.load(torch.cat(values[:2]), values.counters, kept=values.kept)
            if not was_written:
                frozen.put_back(self._frozen)
        modes = heard == "on_validation_model_train"
        with _taking_settings(federation, heard, modes=modes) if self._is_fit else nullcontext():
            yield
        after, now, self._written = layout.weights(), frozen.copies(), None
        is_same_frozen = all(is_same(now[name], kept[name]) for name in now)
        if any(gather_objects(federation.fabric, not is_same_frozen or after.differ_from(z))):
            self._written, self._frozen = Weights(*_of_process_0(federation.fabric, after)), now
            federation.load_global()
        if not was_written:
            frozen.put_back(kept)

    @contextmanager
    def models(self) -> Iterator[Models]:
        """Give the models to evaluate: the global one has what the hooks wrote, the clients' own are as they are."""
        models, written = self._federation.models(), self._written
        if written is None:
            yield models
            return
        was, now = (torch.cat(values[:2]) for values in (self._federation.layout.weights(), written))
        with self._federation.layout.frozen.kept():
            self._federation.layout.frozen.put_back(self._frozen)
            # Elements that were not written keep the value of the method's global model, which is z by default.
            yield replace(models, z=torch.where(now == was, models.z, now), counters=written.counters)

    def end(self) -> None:
        """Say once if the hooks left anything else than z."""
        if self._written is not None:
            self._federation.bench.say(
                "model: hooks around an evaluation wrote into weights or buffers: that is evaluated as the global "
                "model, but not kept. To change the global model, write into it in on_round_end (said once)."
            )
        self._written = None


@contextmanager
def beginning_again(
    federation: Federation, error: WrittenParametersError, frozen: dict[str, Tensor], hooked: dict[str, Tensor]
) -> Iterator[None]:
    """Make buffers of what a round was found to write, and go back to where its clients began.

    Inside this context the federation is as it was before the round; then what ``on_round_start``, which is not called
    again, wrote into weights and buffers is in them again.

    Args:
        federation: The federation.
        error: The error that names the parameters, or the buffers that change their shape.
        frozen: Values of the frozen parameters before the round, from ``FrozenParameters.copies``.
        hooked: The same, when the clients began.

    Raises:
        WrittenParametersError: Not all of the parameters were copied before the round, or clients' rows in a file
            would have to be made longer.
    """
    layout, module = federation.layout, federation.user.module
    changing = [name for name in error.names if name in {place.full_name for place in layout.places}]
    is_in_file = federation.server.round > 1 and federation.clients.file_rows is not None
    if not changing and (is_in_file or not set(error.names) <= frozen.keys()):
        raise error
    federation.load_global()
    layout.frozen.put_back(hooked)
    written = {name: tensor.detach().clone() for name, tensor in _tensors(module)}
    federation.rollback()
    layout.frozen.put_back(frozen)
    federation.load_global()
    federation.take_as_changing(changing)
    if not changing:
        # In the module's order, whichever process has found the first of them.
        federation.take_as_buffers([mark.name for mark in layout.frozen.marks if mark.name in error.names])
        federation.load_global()
        rank_zero_info(
            f"model: training writes {shorten([*map(repr, error.names)], 1)}, which have requires_grad=False, as "
            "momentum and teacher networks do: they travel as buffers do (trainer.buffers), and the round begins again."
        )
    yield
    before = layout.weights()
    for name, tensor in _tensors(module):
        tensor.data.copy_(written[name])
    layout.frozen.mark()
    _take_written(federation, before)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _say_that_scratch_is_put_back(federation: Federation, hook: str, before: Sequence[Tensor | None]) -> None:
    """Say once that what a hook of rounds wrote into buffers that do not travel has no effect."""
    pairs = zip(federation.user.scratch, before, strict=True)
    names = [each.full_name for each, then in pairs if not is_same(each.copy(), then)]
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
    held = [(each, each.initial) for each in user.scratch if each.initial is not None]
    for (each, _), value in zip(held, _of_process_0(federation.fabric, [mine for _, mine in held]), strict=True):
        each.put(value)
    user.keep_scratch()


def _of_process_0(fabric: Fabric, values: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the values that process 0 has, on every process."""
    if fabric.world_size == 1 or not values:
        return values
    sent = fabric.broadcast([value.cpu() for value in values])
    return [theirs.to(mine.device) for theirs, mine in zip(sent, values, strict=True)]
