"""Proof of a client's round: it is worked out again from the messages that were kept, and compared with the answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import read
from fedbc_lightning.federation.elsewhere import folder_of
from fedbc_lightning.federation.messages import MessageError, Up, decode, hash_of
from fedbc_lightning.run.run_record import read_table
from fedbc_lightning.trainer.client_round import ClientRound

# Largest difference from the largest number of a vector that another processor or library may make in one round
TOLERANCE = 1e-4


def verify(worker: ClientRound, run_folder: Path, client: int, round: int) -> str:
    """Work a client's round out again.

    Args:
        worker: A worker with the module, data and method of the run.
        run_folder: The run folder, in which the messages were kept.
        client: The client.
        round: The round.

    Returns:
        A line that says how the answer agrees with what the client sent.

    Raises:
        ConfigurationError: There are no such messages, they are not those of ``clients.csv``, or the answer differs by
            more than :data:`TOLERANCE`.
    """
    folder, who = folder_of(run_folder, round), f"client {client}, round {round}"
    try:
        kept = {path.name: read(path) for path in sorted([*folder.iterdir(), folder / "start"])}
    except OSError as error:
        raise ConfigurationError(
            f"round: '{error.filename}' cannot be read ({error.strerror}): there was no such round, or the run's "
            "trainer.backend had no keep_messages: true, which keeps messages."
        ) from None
    table = read_table(run_folder / "clients.csv")
    rows = table[table["round"] == round]
    if rows.empty:
        raise ConfigurationError(f"round: round {round} was broken off: clients.csv has no row of it.")
    rows = rows[rows["client"] == client]
    start, hashes = kept.pop("start"), {*rows.get("hash_down", ()), *rows.get("hash_up", ())}
    begun = sha256(start)
    found = [one for one in kept.values() if not hashes.isdisjoint([hash_of(one, begun), hash_of(one)])]
    if len(found) != 2:
        raise ConfigurationError(
            f"client: '{folder}' lacks the messages whose hashes clients.csv has for {who}: it took no part or had "
            "dropped out, or a file was removed, changed or cut off."
        )
    down, up = found
    try:
        again = worker.answer(start, down)
    except MessageError as error:
        raise ConfigurationError(f"{who}: the message that it was sent cannot be worked out here: {error}.") from None
    if again == up:
        return f"{who}: worked out again, the answer is the same bit for bit ({hash_of(up)})."
    differences = dict(_differences(vars(decode(up, Up)), vars(decode(again, Up))))
    name, most = max(differences.items(), key=lambda item: item[1], default=("its form as bytes", math.inf))
    if most > TOLERANCE:
        much = f"by {most:.2g} of its largest number" if math.isfinite(most) else "in more than rounding"
        raise ConfigurationError(f"{who}: worked out again, the answer is another one: {name} differs {much}.")
    return f"{who}: worked out again, the answer is the same to {most:.2g} of the largest number ({name})."


def _differences(sent: Any, now: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield what differs in two messages: numbers by how much of the largest one of a tensor, all else by infinity."""
    if isinstance(sent, Tensor) and isinstance(now, Tensor) and (sent.shape, sent.dtype) == (now.shape, now.dtype):
        if sent.is_floating_point() and sent.numel():
            both = torch.stack([sent.double().flatten(), now.double().flatten()])
            one, other = both[:, ~(both[0] == both[1]) & ~both.isnan().all(dim=0)]
            scale = max(float(both[0].nan_to_num(0, 0, 0).abs().max()), torch.finfo(torch.float32).tiny)
            # NaN on one side alone is no number that could be near to another one.
            yield name, float(((one - other).abs() / scale).nan_to_num(math.inf, math.inf).max()) if len(one) else 0.0
        elif not torch.equal(sent, now):
            yield name, math.inf
    elif isinstance(sent, float) and isinstance(now, float):
        one, other = torch.tensor([[sent], [now]], dtype=torch.float64)
        yield from _differences(one, other, name)
    elif isinstance(sent, (dict, list)) and type(sent) is type(now):
        one, other = (each if isinstance(each, dict) else dict(enumerate(each)) for each in (sent, now))
        for key in {**one, **other}:
            yield from _differences(one.get(key), other.get(key), f"{name}.{key}".lstrip("."))
    elif type(sent) is not type(now) or isinstance(sent, Tensor) or sent != now:
        yield name, math.inf
