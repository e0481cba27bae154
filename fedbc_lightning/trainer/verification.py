"""Proof of a client's round: it is worked out again from the messages that were kept, and compared with the answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import read
from fedbc_lightning.federation.elsewhere import folder_of
from fedbc_lightning.federation.messages import Down, MessageError, MessageHash, Up, decode, hash_of
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
    place = _place_of(folder, client, round)
    start, down, up = (_kept(path) for path in (folder / "start", place, place.with_suffix(".up")))
    rows = read_table(run_folder / "clients.csv")
    rows = rows[(rows["round"] == round) & (rows["client"] == client)]
    hashes = MessageHash(start).then(down), hash_of(up)
    if hashes not in zip(rows.get("hash_down", ()), rows.get("hash_up", ()), strict=True):
        raise ConfigurationError(
            f"round: '{place}' and its answer are not the messages whose hashes '{run_folder / 'clients.csv'}' has for "
            f"{who}; one of the files was changed or cut off after the run."
        )
    again = worker.answer(start, down)
    if again == up:
        return f"{who}: worked out again, the answer is the same bit for bit ({hash_of(up)})."
    differences = dict(_differences(vars(decode(up, Up)), vars(decode(again, Up))))
    name, most = max(differences.items(), key=lambda item: item[1], default=("its form as bytes", math.inf))
    if most > TOLERANCE:
        much = f"by {most:.2g} of its largest number" if math.isfinite(most) else "in more than rounding"
        raise ConfigurationError(f"{who}: worked out again, the answer is another one: {name} differs {much}.")
    return f"{who}: worked out again, the answer is the same to {most:.2g} of the largest number ({name})."


def _place_of(folder: Path, client: int, round: int) -> Path:
    """Return the message to a client among those of a round.

    Raises:
        ConfigurationError: There is none, or it was not answered.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"round: '{folder.parent}' has no messages of round {round}: there was no such round, or the run's "
            "trainer.backend had no keep_messages: true, which keeps them."
        )
    broken = list[str]()
    for path in sorted(folder.glob("*.down")):
        try:
            is_it = client in decode(_kept(path), Down).clients
        except MessageError as error:
            broken.append(f"'{path}': {error}")
            continue
        if is_it and path.with_suffix(".up").exists():
            return path
        if is_it:
            raise ConfigurationError(
                f"client: there is no answer of client {client} in '{folder}'; it had dropped out."
            )
    more = f"; unreadable are {'; '.join(broken)}" if broken else ""
    raise ConfigurationError(f"client: '{folder}' has no messages of client {client}, which took no part{more}.")


def _kept(path: Path) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise ConfigurationError(f"round: '{path}' cannot be read ({error.strerror}), and it is part of it.") from None


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
    elif isinstance(sent, dict) and isinstance(now, dict):
        for key in {**sent, **now}:
            yield from _differences(sent.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif isinstance(sent, list) and isinstance(now, list) and len(sent) == len(now):
        for k, pair in enumerate(zip(sent, now, strict=True)):
            yield from _differences(*pair, f"{name}[{k}]")
    elif type(sent) is not type(now) or isinstance(sent, (Tensor, list)) or sent != now:
        yield name, math.inf
