"""Proof of a client's round: it is worked out again from the messages that were kept, and compared with the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import read
from fedbc_lightning.federation.elsewhere import folder_of
from fedbc_lightning.federation.messages import Down, MessageHash, Up, decode, hash_of
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
    folder = folder_of(run_folder, round)
    downs = {path: read(path) for path in sorted(folder.glob("*.down"))}
    place = next((path for path, down in downs.items() if client in decode(down, Down).clients), None)
    if place is None or not place.with_suffix(".up").exists():
        raise ConfigurationError(
            f"round: '{folder}' has no messages of client {client}; they are kept if the run's trainer.backend has "
            "keep_messages: true, for the clients that answered in that round."
        )
    start, down, up = read(folder / "start"), downs[place], read(place.with_suffix(".up"))
    rows = read_table(run_folder / "clients.csv")
    row = rows[(rows["round"] == round) & (rows["client"] == client)].iloc[0]
    if (row["hash_down"], row["hash_up"]) != (MessageHash(start).then(down), hash_of(up)):
        raise ConfigurationError(f"'{place}' and its answer are not the messages whose hashes are in clients.csv.")
    again = worker.answer(start, down)
    who = f"client {client}, round {round}"
    if again == up:
        return f"{who}: worked out again, the answer is the same bit for bit ({hash_of(up)})."
    differences = dict(_differences(vars(decode(up, Up)), vars(decode(again, Up))))
    name, most = max(differences.items(), key=lambda item: item[1], default=("its numbers", 0.0))
    if most > TOLERANCE:
        raise ConfigurationError(f"{who}: worked out again, the answer is another one: {name} differs by {most:.2g}.")
    return f"{who}: worked out again, the answer is the same to {most:.2g} of the largest number ({name})."


def _differences(sent: Any, again: Any, name: str = "") -> Any:
    """Yield the names of all tensors in two messages with their largest difference over their largest number."""
    if isinstance(sent, Tensor):
        if sent.shape != again.shape:
            yield name, float("inf")
        elif sent.numel():
            scale = max(float(sent.double().abs().max()), torch.finfo(torch.float32).tiny)
            yield name, float((sent.double() - again.double()).abs().max()) / scale
    elif isinstance(sent, (dict, list)):
        pairs = sent.items() if isinstance(sent, dict) else enumerate(sent)
        for key, value in pairs:
            yield from _differences(value, again[key], f"{name}.{key}".lstrip("."))
