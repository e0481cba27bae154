"""What the server expects in the messages of clients: all of it is checked before anything is made or used of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.data.datamodule import SPLITS
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.kept_rows import TAKEN
from fedbc_lightning.federation.messages import Facts, Measured, MessageError, Up
from fedbc_lightning.state import ClientStore

# Most samples of a split of which a client may tell; the server keeps a number for each
MOST_SAMPLES = 10**8
# Most characters of the name of a column of clients.csv
MOST_CHARACTERS = 200


@dataclass(frozen=True)
class Expected:
    """What an answer must repeat of the messages that it answers.

    Attributes:
        form: Hash of what server and clients agree on.
        round: Number of the round.
        clients: Their numbers.
        positions: Their places in the round; None for an evaluation, which has none.
        answers: Hash of the messages that are answered.
    """

    form: str
    round: int
    clients: list[int]
    positions: list[int] | None
    answers: str


def check_answer(found: Up | Measured, expected: Expected, federation: Federation) -> None:
    """Raise unless a message holds, in each field, what clients of this method, model and state can send.

    Whether its numbers are finite is no part of it: a client whose numbers are not is ``nonfinite``.

    Args:
        found: The message; tensors that are still to be made may stand on the device ``meta``.
        expected: What it must repeat.
        federation: The federation at the server.

    Raises:
        MessageError: It does not; the message names the field.
    """
    for name, value in vars(expected).items():
        if repr(getattr(found, name, None)) != repr(value):
            raise MessageError(f"its {name} is {_short(getattr(found, name, None))}, and {value} was asked")
    if isinstance(found, Up):
        _check_up(found, federation)
    else:
        _check_measured(found)


def _check_measured(found: Measured) -> None:
    for split in _names("results", found.results, ("test", "val")):
        tasks = found.results[split]
        for task in _names(f"results of {split}", tasks, tasks):
            what = f"results of {split}, {_short(task)}"
            kind, client = task if isinstance(task, tuple) and len(task) == 2 else (None, None)
            if not isinstance(kind, str) or type(client) is not int or client not in found.clients:
                raise MessageError(f"its {what}, are none of its clients'")
            names = _names(what, tasks[task], tasks[task])
            _check_list(what, names, len(names), str)
            _check_list(what, [*tasks[task].values()], len(names), float, int)
    for key in _names("best_metrics", found.best_metrics, found.best_metrics):
        held = found.best_metrics[key]
        if not isinstance(key, str) or key.rpartition(" ")[2] not in map(str, found.clients):
            raise MessageError(f"its best_metrics {_short(key)} are none of its clients'")
        _check_list("best_metrics", held, len(held) if isinstance(held, list) else 0, list, type(None))
        for values in filter(None, held):
            _check_list("best_metrics", values, len(values), float, int)


def _check_up(up: Up, federation: Federation) -> None:
    layout, server, store = federation.layout, federation.server, federation.clients
    places = {place.full_name for place in layout.places}.difference(layout.changing)
    may_be_written = places.union(mark.name for mark in layout.frozen.marks)
    if not isinstance(up.written, list) or not all(isinstance(k, str) and k in may_be_written for k in up.written):
        raise MessageError(f"its written {_short(up.written)} are no frozen parameters or buffers of the model")
    if up.written:
        return
    number, z, kinds = len(up.clients), server.z, federation.declaration.client_messages
    _check_list("valid", up.valid, number, bool)
    _check_list("steps", up.steps, number, int)
    _check_list("losses", up.losses, number, float, int)
    shapes = {"vector": (number, len(z)), "number": (number,)}
    _check_tensor("w", up.w, z.dtype, shapes["vector"])
    _check_tensor("buffers", up.buffers, server["buffers"].dtype, (number, layout.num_buffers))
    # Buffers whose shape changes lie among the counters.
    shape = (number, len(server["counters"]))
    _check_tensor("counters", up.counters, torch.int64, *([] if layout.changing else [shape]))
    _check_tensor("step_size", up.step_size, None, (number, 1), shapes["vector"])
    sent = {name: kind for name, kind in kinds.items() if kind in shapes}
    for name in _names("messages", up.messages, sent, sent):
        _check_tensor(f"messages '{name}'", up.messages[name], None, shapes[sent[name]])
    of_clients = {*store.scalar_names}.difference([TAKEN], federation.declaration.scalars_of_server)
    for name in _names("scalars", up.scalars, of_clients):
        _check_tensor(f"scalars '{name}'", up.scalars[name], None, shapes["number"])
    vectors = [] if TAKEN in store.scalar_names else [name for name in store.names if name not in store.scalar_names]
    for name in _names("rows", up.rows, vectors):
        _check_list(f"rows '{name}'", up.rows[name], number, Tensor)
        for row, num_samples in zip(up.rows[name], federation.sizes(up.clients), strict=True):
            _check_row(f"rows '{name}'", row, store, name, (num_samples + 1) * len(server.model))
    _check_list("records", up.records, number, dict)
    columns = {name for name, kind in kinds.items() if kind == "column"}
    columns |= {"num_steps"} | ({"grad_scale"} if federation.bench.scaler is not None else set())
    for record in up.records:
        _check_record(record, columns)


def check_facts(facts: Facts, client: int) -> None:
    """Raise unless a message holds the numbers of samples of one client, by split and class.

    Raises:
        MessageError: It does not.
    """
    if repr(facts.clients) != repr([client]):
        raise MessageError(f"its clients is {_short(facts.clients)}, and {[client]} was asked")
    _check_list("counts", facts.counts, 1, dict)
    for name in _names("counts", facts.counts[0], SPLITS, SPLITS):
        counts = facts.counts[0][name]
        _check_list(f"counts '{name}'", counts, max(1, len(counts) if isinstance(counts, list) else 1), int)
        if sum(counts) > MOST_SAMPLES:
            raise MessageError(f"its counts '{name}' are {sum(counts):,} samples, and at most {MOST_SAMPLES:,} can be")


def _short(value: Any) -> str:
    """Return a value for a message, in one line and cut if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else f"{text[:60]} ..."


def _check_list(name: str, values: Any, number: int, *kinds: type) -> None:
    """Raise unless a value is a list of so many values of these types; integers must not be negative."""
    if not isinstance(values, list) or len(values) != number:
        raise MessageError(f"its {name} is {_short(values)}, and a list of {number} was expected")
    for value in values:
        # True is an int in Python, and no number here; a subclass such as a Parameter cannot come from bytes.
        if type(value) not in kinds or (type(value) is int and not 0 <= value < 2**63):
            wanted = f"{kinds[0].__name__}{' from 0 on' if kinds[0] is int else ''}"
            raise MessageError(f"its {name} holds {_short(value)}, and {wanted} was expected")


def _check_tensor(name: str, value: Any, dtype: torch.dtype | None, *shapes: Sequence[int]) -> None:
    """Raise unless a value is a tensor of a dtype, None: a floating one, and of one of these shapes; none: (n,)."""
    if not isinstance(value, Tensor):
        raise MessageError(f"its {name} is {_short(value)}, and a tensor was expected")
    fits = value.is_floating_point() if dtype is None else value.dtype == dtype
    fits &= tuple(value.shape) in {tuple(shape) for shape in shapes} if shapes else value.ndim == 1
    if not fits:
        wanted = f"{' or '.join(str(tuple(shape)) for shape in shapes) or '(n,)'} of {dtype or 'floating numbers'}"
        raise MessageError(f"its {name} has the shape {tuple(value.shape)} of {value.dtype}, and {wanted} was expected")


def _check_row(what: str, row: Tensor, store: ClientStore, name: str, most: int) -> None:
    """Raise unless a tensor may be a client's row; a table is any vector that has come, or zeros for each sample."""
    start, shape = store.start(name), store.row_shape(name)
    if shape is None and row.is_meta and row.numel() > most:
        raise MessageError(f"its {what} has {row.numel():,} numbers, of which nearly all are 0")
    _check_tensor(what, row, None if start.is_floating_point() else start.dtype, row.shape if shape is None else shape)


def _names(field: str, given: Any, known: Collection[Any], required: Collection[Any] = ()) -> list[Any]:
    """Return the names in a mapping, or raise unless all of them are known and none is missing that is required."""
    if not isinstance(given, Mapping):
        raise MessageError(f"its {field} is {_short(given)}, and values by name were expected")
    wrong = [name for name in given if name not in known]
    if wrong:
        hint = "; the method declares what it sends by client_message, in declare_state" if field == "messages" else ""
        raise MessageError(f"its {field} {_short(wrong[0])} is not known{hint}")
    missing = [name for name in required if name not in given]
    if missing:
        raise MessageError(f"its {field} '{missing[0]}' is missing")
    return list(given)


def _check_record(record: Mapping[Any, Any], columns: Collection[str]) -> None:
    """Raise unless a client's row has known columns alone, and numbers in them."""
    for name, value in record.items():
        is_logged = isinstance(name, str) and name.startswith("train_")
        if not (name in columns or (is_logged and name.isprintable() and len(name) <= MOST_CHARACTERS)):
            raise MessageError(
                f"its records have the column {_short(name)}, which is not known; the method declares a column by "
                "client_message, in declare_state"
            )
        _check_list(f"records '{name}'", [value], 1, *([int] if name == "num_steps" else [float, int]))
        if name == "grad_scale" and not 0 < value < math.inf:
            raise MessageError(f"its records '{name}' is {value}, which is no scale")
