"""Checks, if the user asks for it, that a client's result does not depend on who has trained before it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.described import GENERATORS, LIBRARIES, Budget, attributes_of
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.core.storable import plain_values
from fedbc_lightning.core.text import shorten
from fedbc_lightning.federation import user_methods as methods
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.module.kept_optimizers import kept_by
from fedbc_lightning.state.layout import is_same

# Bytes from which on a tensor or an array is not copied, and items up to which those of a container are
LARGE, MANY = 2**20, 1000


def check_isolation(federation: Federation) -> None:
    """Train two clients in both orders, each from the same attributes, and compare the results bit for bit.

    Args:
        federation: Before its first round, whose start hooks were called; it is left as it was.

    Raises:
        ConfigurationError: A client's result depends on the order; the message says what differed, and what changed.
        WrittenParametersError: A frozen parameter was written.
    """
    bench, clients = federation.bench, [int(client) for client in federation.participation.clients[:2]]
    if federation.algorithm.trains_pooled or len(clients) < 2:
        bench.say("trainer.check_isolation: no two clients train one after another, so there is nothing to check.")
        return
    federation.server.round, num_steps = 1, bench.work.num_steps
    federation.user.shim.set(training=True)
    federation.start_local_steps(1)
    federation.engine.start_round()
    shared, found, changed = SharedAttributes(federation), list[dict[int, dict[str, Any]]](), dict[str, None]()
    for client in clients:
        bench.train_loader(client)  # its data set is made, if it is kept, so that this is no change
    with preserved_globals(federation.user.device):
        for order in (clients, clients[::-1]):
            before, put_back = shared.described(), shared.noted()
            found.append({client: _trained(federation, client) for client in order})
            after = shared.described()
            put_back()
            changed |= dict.fromkeys(name for name in {**before, **after} if before.get(name) != after.get(name))
            federation.layout.check_replaced(at_start=True)
            federation.layout.check_trainable(is_round_over=True)
    bench.work.num_steps = num_steps
    federation.load_global()
    for client, other in (clients, clients[::-1]):
        here, there = (results[client] for results in found)
        differs = [name for name in {**here, **there} if not _is_same(here.get(name), there.get(name))]
        if differs:
            raise ConfigurationError(_text(federation, client, other, differs[0], list(changed), list(shared.partial)))


def _text(federation: Federation, client: int, other: int, what: str, changed: list[str], partial: list[str]) -> str:
    names = shorten(changed or partial, 3)
    but = f", but {names} cannot be compared: look there, and" if partial else ": look"
    cause = (
        f"while they trained, {names} changed, which is neither parameter nor buffer: set it anew in on_client_start, "
        "or make it a buffer (trainer.buffers)"
        if changed
        else f"no attribute of module, callbacks or data has changed{but} for global variables, files and clocks"
    )
    if federation.user.device.type != "cpu":
        cause += "; on this device, set trainer.deterministic: true as well"
    return f"trainer.check_isolation: {what} of client {client} differs if client {other} trains before it; {cause}."


def _trained(federation: Federation, client: int) -> dict[str, Any]:
    """Return everything that the training of a client gives, by name."""
    layout, cohort = federation.layout, federation.make_cohort([client], [0])
    with methods.trained(federation.algorithm, cohort, 1):
        federation.algorithm.client_update(federation.engine, cohort, federation.server)
    row = torch.cat([cohort.w, cohort.kept], dim=1)[0] if cohort.kept.numel() else cohort.w[0]
    tensors = layout.named_slices(row) | layout.named_buffers(cohort.buffers[0], cohort.counters[0])
    found = {f"'{name}'": tensor.clone() for name, tensor in tensors.items()}
    return found | {f"column '{name}'": value for name, value in cohort.records[0].items()}


def _is_same(here: Any, there: Any) -> bool:
    if isinstance(here, Tensor) and isinstance(there, Tensor):
        return is_same(here, there)
    return bool(here == there or (here != here and there != there))  # NaN


class SharedAttributes:
    """The attributes of what all clients share: module, callbacks and data of the user's, and their classes.

    Args:
        federation: It has the module, the callbacks and the data.

    Attributes:
        partial: Names of attributes that hold something whose changes do not show, such as an iterator.
    """

    def __init__(self, federation: Federation) -> None:
        user, data = federation.user, federation.datamodule
        owners = [(f"model.{k}".rstrip("."), each) for k, each in user.module.named_modules()]
        owners += [(type(each).__name__, each) for each in user.hooks.callbacks if not is_ours(each)]
        owners += [("data", each) for each in {id(each): each for each in (data.users_module, data)}.values()]
        classes = dict.fromkeys(cls for _, owner in owners for cls in type(owner).__mro__)
        owners += [(cls.__name__, cls) for cls in classes if cls.__module__.partition(".")[0] not in LIBRARIES]
        self._owners, self.partial = owners, dict[str, None]()
        self._shared = [
            *(owner for _, owner in owners), *user.module.parameters(), *user.module.buffers(),
            *kept_by(user.module), user.shim, federation.fabric,
        ]  # fmt: skip

    def described(self) -> dict[str, Any]:
        """Return a description of each attribute by name, which differs if the attribute has changed."""
        left, found = Budget(map(id, self._shared)), dict[str, Any]()
        for owner_name, owner in self._owners:
            for key, value in attributes_of(owner).items():
                name = f"{owner_name}.{key}".replace("data._datasets", "a client's data set")
                left.is_partial = False
                found[name] = left.describe(value)
                if left.is_partial:
                    self.partial[name] = None
        return found

    def noted(self) -> Callable[[], None]:
        """Return a function that gives the owners the attributes again that they have now, and what these hold."""
        noted = [(owner, {key: _noted(v) for key, v in attributes_of(owner).items()}) for _, owner in self._owners]

        def put_back() -> None:
            for owner, attributes in noted:
                for key in attributes_of(owner).keys() - attributes.keys():
                    delattr(owner, key)
                for key, value in attributes.items():
                    setattr(owner, key, value)

        return put_back


def _noted(value: Any) -> Any:
    """Copy a value that code may change in place; large ones, and objects of other classes, are not copied."""
    if isinstance(value, (Tensor, np.ndarray, *GENERATORS)) and getattr(value, "nbytes", 0) < LARGE:
        with suppress(Exception):  # a tensor with a graph
            return copy.deepcopy(value)
    if not isinstance(value, (dict, list, set, deque)):
        return value
    plain = plain_values({"": value}) if len(value) <= MANY else {}
    return plain.get("", copy.copy(value))
