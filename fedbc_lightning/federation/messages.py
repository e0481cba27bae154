"""What travels between the server and clients that are elsewhere: typed messages, and their form as bytes.

In a round the server sends one :class:`RoundStart`, which is the same for all clients, and a :class:`Down` for the
clients of each message; what comes back is an :class:`Up`. A :class:`Down` alone, before the first round, asks for
:class:`Facts`. As bytes, a message is a safetensors file whose metadata holds all that is no tensor as JSON: nothing in
it is ever run, so it may come from anybody.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import safetensors.torch as safetensors
import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError

# Version of these messages; a server and its clients must speak the same
VERSION = "3"

# Least number of elements of a vector that is shortened, and most distinct numbers of one that is sent by their index
LEAST_SHORTENED, MOST_DISTINCT = 1024, 256

Kind = TypeVar("Kind", "RoundStart", "Down", "Up", "Facts", "Measured", "Rows")

# What clients send of a round
Answer = TypeVar("Answer", "Up", "Measured")


class MessageError(ConfigurationError):
    """A message cannot be used; the text says why."""


@dataclass(frozen=True)
class RoundStart:
    """What the server sends to all clients of a round.

    Attributes:
        form: Hash of what server and clients must agree on, see :func:`form_of`.
        task: What they are asked for.
        round: Number of the round, 1..T; 0 for an evaluation before the first.
        engine: Kind of the engine that trains them, and whether a rule of the server has chosen it.
        server: The values of the server that clients read, by name: z as they receive it, buffers, counters, and what
            the method has declared for them; for an evaluation, the global model that is evaluated and the one beside
            which clients have their own, each with its integer buffers.
        learning_rates: The rates of the optimizer's groups, where a schedule over rounds sets them.
        grad_scale: Scale at which gradients start in 16-mixed precision.
        written: Names of the frozen parameters that are treated as buffers, because training writes them.
        changing: Names of the buffers whose shape changes.
        hooks: What hooks of rounds have set for all clients beside the model.
        sampled: The clients that are sampled in a round; empty if the channel hides who takes part, and in an
            evaluation.
        ids: The sampled clients that train and whose answers the server uses, in the same order; empty as above.
    """

    form: str
    task: Literal["train", "evaluate"]
    round: int
    engine: list[Any]
    server: dict[str, Tensor]
    learning_rates: list[float] | None
    grad_scale: float
    written: list[str]
    changing: list[str]
    hooks: dict[str, Any]
    sampled: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Down:
    """What the server sends to K clients that train together.

    Attributes:
        clients: Their numbers.
        positions: Their places among the clients that are sampled.
        local: Number of ``epochs`` or of ``steps``, the other one None, of stragglers, which do less; None: as all
            others.
        scalars: Their declared scalars, (K,) each, by name.
        rows: Their declared vectors, a list of K by name; none where these stay with them.
        taken: Where their vectors stay with them, the last round of each whose message has become part of z; -1: none.
        best_metrics: For an evaluation, the best values so far of their metrics that keep these.
    """

    clients: list[int]
    positions: list[int]
    local: dict[str, Any] | None
    scalars: dict[str, Tensor]
    rows: dict[str, list[Tensor]]
    taken: list[int] = field(default_factory=list)
    best_metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Up:
    """What K clients that have trained together send to the server.

    Attributes:
        valid: Whether the weights and the state of each are finite.
        w: (K, d) what the channel lets through of their models: w_i, or Δ_i where a part of it changes updates.
        buffers: (K, b) floating-point buffers.
        counters: (K, c) integer buffers.
        messages: Further messages by name, (K, ...).
        scalars: Staged scalars by name, (K,).
        rows: Staged vectors, a list of K by name; none where these stay with the clients.
        step_size: (K, 1) or (K, d) mean learning rate.
        steps: Number of steps of each.
        losses: Mean loss of each.
        records: What each has counted and logged, by column of ``clients.csv``.
        written: Names of the frozen parameters that training has written; then all else counts nothing.
        answers: Hash of the messages that this one answers, in which all stands about run, round and clients.
    """

    valid: list[bool]
    w: Tensor
    buffers: Tensor
    counters: Tensor
    messages: dict[str, Tensor]
    scalars: dict[str, Tensor]
    rows: dict[str, list[Tensor]]
    step_size: Tensor
    steps: list[int]
    losses: list[float]
    records: list[dict[str, Any]]
    written: list[str] = field(default_factory=list)
    answers: str = ""


@dataclass(frozen=True)
class Facts:
    """What clients tell of their data before the first round, where these are not the server's.

    Attributes:
        clients: Their numbers.
        counts: For each of them the number of its samples of each class by split, a single number where there are no
            classes.
    """

    clients: list[int]
    counts: list[dict[str, list[int]]]


@dataclass(frozen=True)
class Rows:
    """What a client keeps of its vectors where these stay with it; it is encoded as messages are.

    Attributes:
        form: As in :class:`RoundStart`, before the first round.
        versions: The vectors by name, for each round after whose answer they were these; -1: before the first.
    """

    form: str
    versions: dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class Measured:
    """What clients have measured.

    Attributes:
        results: The values of each task by split, see :class:`~fedbc_lightning.evaluation.measurement.Results`.
        best_metrics: As in :class:`Down`, with these values.
        answers: As in :class:`Up`.
    """

    results: dict[str, dict[tuple[str, int], dict[str, float]]]
    best_metrics: dict[str, Any]
    answers: str = ""


def encode(message: RoundStart | Down | Up | Facts | Measured | Rows) -> bytes:
    """Return a message as bytes, which own their memory.

    Raises:
        MessageError: It holds a value that JSON cannot express.
    """
    tensors, found, ways = dict[str, Tensor](), dict[str, tuple[torch.dtype, Tensor]](), dict[str, str]()

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().to("cpu", copy=True).contiguous()
            this = value.dtype, value.flatten().view(torch.uint8)
            # Equal bits, such as w and the row that a client keeps of it, travel once.
            equal = (name for name, (dtype, bits) in found.items() if dtype == this[0] and bits.equal(this[1]))
            name = next(equal, str(len(found)))
            if name not in found:
                found[name], (ways[name], parts) = this, _shortened(value)
                tensors.update({f"{name}.{k}": part for k, part in enumerate(parts)})
            return {"tensor": [ways[name], name, list(value.shape)]}
        if isinstance(value, dict):
            return {"items": [[plain(key), plain(item)] for key, item in value.items()]}
        if isinstance(value, (tuple, frozenset, set)):
            return {type(value).__name__: [plain(item) for item in value]}
        return [plain(item) for item in value] if isinstance(value, list) else value

    try:
        content = {each.name: plain(getattr(message, each.name)) for each in fields(message)}
        text = json.dumps([VERSION, type(message).__name__, content])
    except TypeError as error:
        raise MessageError(f"a message cannot hold every value: {error}") from None
    # One entry: safetensors writes several in an order that changes from call to call, and equal messages are to be
    # equal bytes.
    return safetensors.save(tensors, {"message": text})


def decode(data: bytes, kind: type[Kind], check: Callable[[Kind], None] | None = None) -> Kind:
    """Return the message that bytes hold.

    Args:
        data: The bytes.
        kind: The type of message that is expected.
        check: Raises a ConfigurationError if the message cannot be used. It is called before the tensors are made that
            were shortened, since few bytes may stand for many zeros; they stand on the device ``meta``.

    Raises:
        MessageError: They are no such message: another type or version, or broken off.
    """
    makers = {"tuple": tuple, "frozenset": frozenset, "set": set}
    tensors = dict[str, Tensor]()

    def whole(value: Any, make: Callable[..., Tensor] = _whole) -> Any:
        if isinstance(value, list):
            return [whole(item, make) for item in value]
        if not isinstance(value, dict):
            return value
        ((name, items),) = value.items()
        if name == "tensor":
            way, name, shape = items
            parts = [f"{name}.{k}" for k in range(2)]
            return make(way, [tensors[part] for part in parts if part in tensors], shape)
        items = whole(items, make)
        return dict(items) if name == "items" else makers[name](items)

    try:
        length = int.from_bytes(data[:8], "little")
        version, name, content = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["message"])
        if (name, version) != (kind.__name__, VERSION):
            raise MessageError(
                f"a message {name} of version {version}, where {kind.__name__} of version {VERSION} was expected; "
                "install the same fedbc_lightning at server and clients"
            )
        tensors |= safetensors.load(data)
        if check is not None:
            check(kind(**{each.name: whole(content[each.name], _outline) for each in fields(kind)}))
        return kind(**{each.name: whole(content[each.name]) for each in fields(kind)})
    except ConfigurationError:
        raise
    except Exception as error:  # whatever a stranger sends
        raise MessageError(f"no message of this kind ({type(error).__name__})") from None


def _shortened(values: Tensor) -> tuple[str, list[Tensor]]:
    """Return a way and the tensors from which :func:`_whole` makes the same bits, if these are shorter.

    A float32 vector becomes its nonzero elements and their places (TopK), the upper halves of its numbers if the lower
    ones are 0 (BFloat16), or its distinct numbers and which of them each element is if they are few (Float8, Sign).
    """
    if values.dtype != torch.float32 or values.numel() < LEAST_SHORTENED:
        return "whole", [values]
    bits = values.view(torch.int32).flatten()
    if 2 * int(bits.count_nonzero()) < len(bits):
        places = bits.nonzero()[:, 0]
        return "nonzero", [values.flatten()[places], places.to(torch.int32)]
    # The first elements tell of most vectors that they cannot be shortened.
    if not any(bool((part & 0xFFFF).any()) for part in (bits[:LEAST_SHORTENED], bits)):
        return "halves", [(bits >> 16).to(torch.int16)]
    if len(bits[:LEAST_SHORTENED].unique()) <= MOST_DISTINCT:
        distinct, which = bits.unique(return_inverse=True)
        if len(distinct) <= MOST_DISTINCT:
            return "distinct", [distinct.view(torch.float32), which.to(torch.uint8)]
    return "whole", [values]


def _whole(way: str, parts: list[Tensor], shape: list[int]) -> Tensor:
    """Return the tensor of a shape that was shortened in a way."""
    first = parts[0]
    if way == "nonzero":
        return torch.zeros(math.prod(shape)).index_put_((parts[1].long(),), first).reshape(shape)
    if way == "halves":
        return (first.to(torch.int32) << 16).view(torch.float32).reshape(shape)
    return (first[parts[1].long()].float() if way == "distinct" else first).reshape(shape)


def _outline(way: str, parts: list[Tensor], shape: list[int]) -> Tensor:
    """Return what tells the shape and dtype of :func:`_whole`, without memory for it."""
    if way in ("nonzero", "halves", "distinct"):
        return torch.empty(shape, dtype=torch.float32, device="meta")
    return _whole(way, parts, shape)


def hash_of(message: bytes, begun: Any = None) -> str:
    """Return the hash of a message, which no table takes for a number.

    Args:
        message: The message as bytes.
        begun: ``hashlib.sha256`` of the message before it, if the hash is that of both.
    """
    found = hashlib.sha256() if begun is None else begun.copy()
    found.update(message)
    return f"sha256:{found.hexdigest()[:16]}"


def form_of(*parts: Any) -> str:
    """Return a hash of what server and clients must agree on, such as the layout of models and the declared state."""
    text = json.dumps([VERSION, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
