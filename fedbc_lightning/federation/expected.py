"""What server and clients expect in each other's messages: all is checked before anything is made or used of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from fedbc_lightning.core.metric_names import are_names
from fedbc_lightning.data.datamodule import POOLED, SPLITS
from fedbc_lightning.engines.choice import Kind
from fedbc_lightning.evaluation.measurement import MODELS
from fedbc_lightning.federation.agreement import EVALUATED, values_for_clients
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.federation.kept_rows import TAKEN
from fedbc_lightning.federation.messages import Down, Facts, Measured, MessageError, RoundStart, Up

# Most samples of a split of which a client may tell; the server keeps a number for each
MOST_SAMPLES = 10**8

# Most steps in a round of which a client may tell; the server adds them up, and cannot see how many there were
MOST_STEPS = 10**8

# Most classes of which a client may tell; the server keeps a number for each class of all clients
MOST_CLASSES = 10**6
# Largest finite number: its square, as means and spreads have it, is finite
LARGEST = 1e154

Predicate = Callable[[Any], bool]

NUMBER = (float, int)
# What a client's half can give to cohort.record
CELL = (float, bool, lambda value: type(value) is int and abs(value) < 2**63)
# With which the server can calculate
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DECLARED = "; a method declares by client_message, in declare_state, what its clients send"
HINTS = {
    "answers": ": it answers messages of another client, round or run",
    "scalars": "; one that a part of the server declares is staged in on_cohort_end",
    "messages": DECLARED,
    "records": DECLARED,
    "form": ": model, data, method, seed or settings of training are others here; give all the same config",
}


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a kind.

    Args:
        value: The value; a tensor that is still to be made may stand on the device ``meta``.
        kind: A type, where an integer is one from 0 on and a float NaN, infinite or at most :data:`LARGEST`, a
            predicate, or an equal value; a tuple of kinds: one of them, () nothing.

    Example:
        >>> fits([1, 2], each(int)), fits([1, True], each(int)), fits({"a": -1.0}, named({"a": (float, int)}, "a"))
        (True, False, True)
    """
    if isinstance(kind, tuple):
        return any(fits(value, one) for one in kind)
    if isinstance(kind, type):
        # True is an int in Python, and no number here; a subclass such as a Parameter cannot come from bytes.
        is_one = type(value) is kind
        is_large = kind is float and is_one and LARGEST < abs(value) < math.inf
        return is_one and not is_large and (kind is not int or 0 <= value < 2**63)
    return bool(kind(value)) if callable(kind) else repr(value) == repr(kind)


def each(kind: Any, number: int | None = None) -> Predicate:
    """Return the kind of lists of values of a kind; None: of any number of them."""
    return lambda given: isinstance(given, list) and number in (None, len(given)) and all(fits(v, kind) for v in given)


def named(kinds: Mapping[Any, Any] | Callable[[Any], Any], required: Collection[Any] = ()) -> Predicate:
    """Return the kind of values by name, with their kinds or a function that tells them from the name."""
    of = kinds if callable(kinds) else lambda name: kinds.get(name, ())
    return lambda it: isinstance(it, dict) and {*required} <= {*it} and all(fits(v, of(k)) for k, v in it.items())


def shaped(dtype: torch.dtype | None, *shapes: Sequence[int]) -> Predicate:
    """Return the kind of tensors of a dtype, None: of floating numbers, and of one of these shapes, where -1 is any."""

    def is_one(value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        has_shape = any(len(s) == value.ndim and all(map(lambda a, b: a in (-1, b), s, value.shape)) for s in shapes)
        return has_shape and value.dtype in (FLOATS if dtype is None else (dtype,))

    return is_one


def check_answer(found: Up | Measured, answers: str, clients: list[int], federation: Federation) -> None:
    """Raise unless a message holds, in each field, what clients of this method, model and state can send.

    Whether its numbers are finite is no part of it: a client whose numbers are not is ``nonfinite``.

    Args:
        found: The message.
        answers: Hash of the messages that it answers.
        clients: Their clients.
        federation: The federation at the server.

    Raises:
        MessageError: It does not; the message names the field.
    """
    _check(found, {"answers": answers})
    if isinstance(found, Measured):
        tasks = named(dict.fromkeys(product(MODELS, clients), _logged({})))
        best = _best_metrics(clients, federation)
        _check(found, {"results": named({"test": tasks, "val": tasks}), "best_metrics": best})
        return
    layout, server, store, number = federation.layout, federation.server, federation.clients, len(clients)
    _check(found, {"written": each(_one_of(_buffers(federation, layout.places).difference(layout.changing)))})
    if found.written:
        return
    kinds, vector = federation.declaration.client_messages, (number, len(server.z))
    sent = {"vector": shaped(None, vector), "number": shaped(None, (number,))}
    of_clients = {*store.scalar_names}.difference([TAKEN], federation.declaration.scalars_of_server)
    messages = {name: sent[kind] for name, kind in kinds.items() if kind in sent}
    columns: dict[str, Any] = {name: CELL for name, kind in kinds.items() if kind == "column"}
    steps = columns["num_steps"] = _one_of(range(MOST_STEPS + 1))
    columns |= {} if federation.bench.scaler is None else {"grad_scale": _is_scale}
    _check(found, {
        "valid": each(bool, number), "steps": each(steps, number), "losses": each(NUMBER, number),
        "w": shaped(server.z.dtype, vector), "step_size": shaped(None, (number, 1), vector),
        "buffers": shaped(server["buffers"].dtype, (number, layout.num_buffers)),
        "counters": _counters(federation, number), "messages": named(messages, messages),
        "scalars": named(dict.fromkeys(of_clients, sent["number"])),
        "rows": named({} if TAKEN in federation.clients.names else _rows(federation, clients)),
        "records": each(_logged(columns, "train_"), number),
    })  # fmt: skip


def check_facts(facts: Facts, client: int) -> None:
    """Raise unless a message holds the numbers of samples of one client, by split and class.

    Raises:
        MessageError: It does not.
    """

    def is_counts(value: Any) -> bool:
        return fits(value, each(int)) and 0 < len(value) <= MOST_CLASSES and sum(value) <= MOST_SAMPLES

    _check(facts, {"clients": [client], "counts": each(named(dict.fromkeys(SPLITS, is_counts), SPLITS), 1)})


def check_start(start: RoundStart, federation: Federation) -> None:
    """Raise unless a message holds, in all fields but two, what a server can send to all clients of a round.

    Args:
        start: The message.
        federation: The federation of a worker, which need not have the server's engine and buffers yet.

    Raises:
        MessageError: It does not; the message names the field.
    """
    places, rates = federation.layout.places, federation.schedule.learning_rates
    hooks = {"options": each(dict), "schedulers": each(dict), "evaluating": each(str)}
    hooks |= {"frozen": each(str), "attributes": named(_kind_of_attribute)}
    _check(start, {
        "task": ("train", "evaluate"), "round": int, "grad_scale": _is_scale, "hooks": named(hooks, hooks),
        "engine": tuple([kind, is_by_rule] for kind in get_args(Kind) for is_by_rule in (True, False)),
        "learning_rates": None if rates is None else each(NUMBER, len(rates)),
        "sampled": each(_one_of(range(POOLED, 2**63))),
        "written": each(_one_of(_buffers(federation, ()))), "changing": each(_one_of(_buffers(federation, places))),
    })  # fmt: skip
    _check(start, {"ids": each(_one_of({*start.sampled}))})


def check_values(start: RoundStart, federation: Federation, form: str) -> None:
    """Raise unless a message of a server of this form holds the values that clients of this method and model read.

    Raises:
        MessageError: It does not.
    """
    evaluated = dict.fromkeys(EVALUATED, federation.server.model)
    like = evaluated if start.task == "evaluate" else values_for_clients(federation)
    kinds = {k: _counters(federation) if "counters" in k else shaped(None, v.shape) for k, v in like.items()}
    _check(start, {"form": form, "server": named(kinds, kinds)})


def check_down(down: Down, federation: Federation, task: str | None) -> None:
    """Raise unless a message holds, in each field, what a server can send to some clients.

    Args:
        down: The message.
        federation: The federation of a worker.
        task: What they are asked for, see :class:`~fedbc_lightning.federation.messages.RoundStart`; None: for facts.

    Raises:
        MessageError: It does not; the message names the field.
    """
    is_pooled, store = federation.algorithm.trains_pooled and task == "train", federation.clients
    one = _one_of([POOLED] if is_pooled else range(federation.datamodule.num_clients))
    _check(down, {"clients": lambda value: fits(value, each(one)) and 0 < len(value) == len({*value})})
    number, rows = len(down.clients), _rows(federation, down.clients) if task else {}
    # A straggler does less than all others.
    most = max(federation.participation.num_steps(down.clients))
    epochs = {"epochs": _one_of(range(1, federation.local.epochs or 0)), "steps": None}
    steps = {"epochs": None, "steps": _one_of(range(1, most + 1))}
    taken = each(_one_of(range(-1, 2**63)), number if task and TAKEN in store.scalar_names else 0)
    _check(down, {"taken": taken})
    if min(down.taken, default=-1) >= 0:  # they have their own
        rows = {}
    elif task == "evaluate":
        rows = {name: rows[name] for name in federation.local_models.read_from([*rows])}
    scalars = {name: shaped(None, (number,)) for name in store.scalar_names if task and name != TAKEN}
    _check(down, {
        "positions": each(_one_of(range(federation.datamodule.num_clients)), number if task == "train" else 0),
        "local": (None, named(epochs, epochs), named(steps, steps)),
        "scalars": named(scalars, scalars), "rows": named(rows, rows),
        "best_metrics": _best_metrics(down.clients, federation),
    })  # fmt: skip


def _check(message: Any, kinds: Mapping[str, Any]) -> None:
    """Raise unless the fields of a message are of these kinds, see :func:`fits`."""
    for name, kind in kinds.items():
        value = getattr(message, name)
        if not fits(value, kind):
            said = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
            raise MessageError(f"its {name} cannot be {' '.join(said[:60].split())}{HINTS.get(name, '')}")


def _one_of(known: Collection[Any]) -> Callable[[Any], bool]:
    # Python would compare a text with every number of a range.
    kinds = (int,) if isinstance(known, range) else (int, str)
    return lambda value: type(value) in kinds and value in known


def _kind_of_attribute(place: Any) -> Any:
    return (lambda value: True) if isinstance(place, tuple) and fits([*place], each(str, 2)) else ()


def _is_scale(value: Any) -> bool:
    return bool(fits(value, NUMBER) and 0 < value < math.inf)


def _logged(columns: Mapping[str, Any], prefix: str = "") -> Predicate:
    """Return the kind of what a client has logged under names with a prefix, beside some columns."""
    cells = named(lambda name: columns.get(name, NUMBER if str(name).startswith(prefix) else ()))
    return lambda it: cells(it) and are_names([k.removeprefix(prefix) for k in it.keys() - columns.keys()])


def _buffers(federation: Federation, places: Sequence[Any]) -> set[str]:
    """Return the names of frozen parameters, of those that are treated as buffers, and of these buffers."""
    layout = federation.layout
    return {*layout.written, *(mark.name for mark in layout.frozen.marks), *(place.full_name for place in places)}


def _counters(federation: Federation, *number: int) -> Predicate:
    # Buffers whose shape changes lie among the counters.
    return shaped(torch.int64, (*number, -1 if federation.layout.changing else len(federation.server["counters"])))


def _rows(federation: Federation, clients: list[int]) -> dict[str, Any]:
    """Return the kinds of the clients' vectors that travel; a table is any vector that has come, or some zeros."""
    store, sizes = federation.clients, federation.sizes(clients)
    most = (max(sizes) + 1) * len(federation.server.model)

    def kind_of(name: str) -> Predicate:
        start, shape = store.start(name), store.row_shape(name)

        def is_one(row: Any) -> bool:
            of = getattr(row, "shape", ()) if shape is None else shape  # a table has a row for each sample, say
            like = shaped(None if start.is_floating_point() else start.dtype, of)
            return fits(row, like) and (shape is not None or not row.is_meta or row.numel() <= most)

        return each(is_one, len(sizes))

    return {name: kind_of(name) for name in store.vector_names}


def _best_metrics(clients: list[int], federation: Federation) -> Predicate:
    sizes = federation.user.best_metrics.sizes
    held = (None, *(each(NUMBER, size) for size in sizes))
    keys = (" ".join(map(str, key)) for key in product(("test", "val"), MODELS, clients))
    return named(dict.fromkeys(keys, each(held, len(sizes))))
