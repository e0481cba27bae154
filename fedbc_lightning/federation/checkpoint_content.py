"""What a checkpoint holds of a federation, and how a federation takes it back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.storable import plain_copy
from fedbc_lightning.core.text import shorten
from fedbc_lightning.evaluation.measurement import ClientModel
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.module.adapter import put_plain_attributes
from fedbc_lightning.module.client_optimizers import Changes
from fedbc_lightning.state import checkpoint


def state_of(federation: Federation, *, is_last: bool = True) -> dict[str, Any]:
    """Return the committed state except z, which :func:`module_state_of` holds.

    Args:
        federation: Its committed state is taken.
        is_last: Whether the state goes into ``last.ckpt``, see the client store's ``state_dict``.
    """
    return {
        "fingerprint": federation.fingerprint,
        "server": federation.server.state_dict(),
        "clients": federation.clients.state_dict(is_last=is_last),
        "schedule": federation.schedule.state_dict(),
        "grad_scale": federation.grad_scale,
        "written_parameters": federation.layout.written,
        "changing_buffers": federation.layout.changing,
        "best_metrics": federation.user.best_metrics.values,
        "per_tensor_optimizer": not federation.bench.optimizer.is_flat,
    }


def set_by_hooks(federation: Federation) -> dict[str, Any]:
    """Return what hooks of the run and of rounds have set for all clients beside the model; see :func:`put_back`."""
    written, user = federation.bench.optimizer.written, federation.user
    return {
        "options": written.options, "schedulers": written.schedulers, "evaluating": sorted(user.evaluating),
        "frozen": sorted(federation.layout.frozen_by_hooks), "attributes": user.changed_attributes,
    }  # fmt: skip


def module_state_of(
    federation: Federation, own: ClientModel | None = None, *, with_frozen: bool = True
) -> dict[str, Tensor]:
    """Return the ``state_dict`` of the user's module with a model in it, in the master dtype.

    Args:
        federation: It holds the module and the global model.
        own: The model; None: the committed global one, in which kept parameters are those of the initial model.
        with_frozen: Whether the large parameters that are not trained are in it, see ``FrozenParameters.large``.
    """
    server, layout = federation.server, federation.layout
    model, counters, kept = ClientModel(server.model, server["counters"], server.kept) if own is None else own
    z, buffers = model.tensor_split([layout.num_parameters])
    left_out = {*layout.changing, *(() if with_frozen else layout.large_frozen())}
    whole = federation.user.module.state_dict()
    # An extra state (``get_extra_state``) may be any value.
    state = {name: plain_copy(value, is_snapshot=True) for name, value in whole.items() if name not in left_out}
    row = z.cpu() if kept is None else torch.cat([z.cpu(), kept.cpu()])
    return state | layout.under_all_names(layout.named_buffers(buffers, counters) | layout.named_slices(row))


def prepare_for(federation: Federation, state: dict[str, Any], path: str | Path) -> None:
    """Give a federation the form that a state was saved in; its tensors are taken by :func:`load_state`.

    Args:
        federation: Its parameters that the saved run found to be written become buffers.
        state: The state as :func:`state_of` returned it.
        path: The file it comes from, for messages.

    Raises:
        ConfigurationError: The state is of another model, partition or algorithm.
    """
    federation.take_as_changing(state.get("changing_buffers", []))
    federation.take_as_buffers(state.get("written_parameters", []))
    checkpoint.check_fingerprint(state["fingerprint"], federation.fingerprint, path)


def with_frozen_parameters(
    federation: Federation, module_state: dict[str, Tensor], hashes: dict[str, str], path: str | Path
) -> dict[str, Tensor]:
    """Return a module's state with the frozen parameters that its checkpoint holds as hashes alone.

    Args:
        federation: Its module has the frozen parameters.
        module_state: The module's state in the checkpoint; what it holds is kept.
        hashes: Hashes of the frozen parameters by name; a checkpoint that holds all tensors has none.
        path: The file it comes from, for messages.

    Raises:
        ConfigurationError: The module has other frozen parameters.
    """
    if not hashes:
        return module_state
    here = federation.layout.frozen.hashes()
    differ = [name for name in {**hashes, **here} if hashes.get(name) != here.get(name)]
    if differ:
        raise ConfigurationError(
            f"ckpt_path: '{path}' was trained beside other frozen weights: {shorten([*map(repr, differ)], 1)} "
            "(requires_grad=False), of which it holds hashes only. Make the model as it was made then: from the same "
            "pretrained weights, or with the same seed before it is made."
        )
    return {**federation.layout.large_frozen(), **module_state}


def load_state(
    federation: Federation,
    state: dict[str, Any],
    module_state: dict[str, Tensor],
    path: str | Path | None,
    rows_path: Path | None,
) -> None:
    """Restore a state that the federation was prepared for.

    Args:
        federation: Its state is replaced.
        state: The state as :func:`state_of` returned it.
        module_state: The module's state as :func:`module_state_of` returned it.
        path: The checkpoint's path, for messages.
        rows_path: The file with the clients' rows, if they lie in a file.

    Raises:
        ConfigurationError: The clients' rows cannot be had.
    """
    user, layout, server = federation.user, federation.layout, federation.server
    user.module.load_state_dict(module_state, strict=user.module.strict_loading)
    # load_state_dict writes frozen parameters, too; from here on a write is one of the user's.
    layout.frozen.mark()
    layout.frozen.forget_hashes()
    # z is in the checkpoint under the parameters' own names, so that any Lightning code can load it.
    server.values["z"] = layout.vector_from(module_state).to(server.z.device)
    server.load_state_dict(state["server"])
    federation.clients.load_state_dict(state["clients"], path, rows_path)
    federation.schedule.load_state_dict(state["schedule"])
    federation.grad_scale = state["grad_scale"]
    user.best_metrics.values = dict(state.get("best_metrics", {}))
    # The run had found an optimizer whose steps differ on flat slices; finding that anew would cost a round.
    if state["per_tensor_optimizer"] and federation.bench.optimizer.is_flat:
        federation.bench.optimizer.use_per_tensor()
    put_back(federation, state.get("set_by_hooks", {}))


def put_back(federation: Federation, found: dict[str, Any]) -> None:
    """Let clients begin with what hooks had set, as :func:`set_by_hooks` returned it."""
    if found:
        federation.bench.optimizer.written = copy.deepcopy(Changes(found["options"], found["schedulers"]))
        federation.user.changed_attributes = dict(found.get("attributes", {}))
        put_plain_attributes(federation.user.module, federation.user.changed_attributes)
        federation.user.evaluating = frozenset(found["evaluating"])
        federation.layout.frozen_by_hooks = frozenset(found.get("frozen", ()))
        federation.layout.put_frozen_back()


def adopt(federation: Federation, other: Federation) -> None:
    """Take the committed state of another federation over the same model, data and algorithm."""
    rows, state = other.clients.file_rows, state_of(other) | {"set_by_hooks": set_by_hooks(other)}
    prepare_for(federation, state, "the last run")
    load_state(federation, state, module_state_of(other), "the last run", None if rows is None else rows.path)
