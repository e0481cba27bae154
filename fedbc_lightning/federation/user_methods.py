"""Calls the methods of algorithms and codecs that a user may have written, and checks what they return and leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.tracebacks import locate
from fedbc_lightning.module.mistakes import place_of
from fedbc_lightning.server import Codec, ServerCallback
from fedbc_lightning.state.cohort import EMPTY, Cohort
from fedbc_lightning.state.declaration import ServerState

if TYPE_CHECKING:
    from fedbc_lightning.engines.base import BaseEngine


def update_clients(algorithm: FederatedAlgorithm, engine: BaseEngine, cohort: Cohort, server: ServerState) -> None:
    """Let a method train a cohort.

    Raises:
        ConfigurationError: The method has trained nobody.
    """
    try:
        algorithm.client_update(engine, cohort, server)
    except Exception as error:
        locate(error, f"{_who(cohort)}, round {server.round}")
        raise
    if cohort.w is EMPTY:
        raise ConfigurationError(
            f"algorithm: {place_of(algorithm, 'client_update')} trained nobody; call engine.solve(cohort, server.model)"
            " in it."
        )


def check_left_behind(algorithm: FederatedAlgorithm, cohort: Cohort) -> None:
    """Raise if the method or one of its parts has given a cohort an attribute, which outlives nothing.

    Raises:
        ConfigurationError: There is such an attribute.
    """
    strange = cohort.strange_attributes()
    if strange:
        raise ConfigurationError(
            f"algorithm: {type(algorithm).__name__} sets cohort.{strange[0]}, which is not kept; write "
            f"cohort.stage('{strange[0]}', ...) for declared state, or cohort.messages['{strange[0]}'] = ... for what "
            "a server part reads."
        )


def call_parts(parts: Sequence[ServerCallback], hook: str, server: ServerState, *args: Any) -> None:
    """Call a hook of all server parts.

    Args:
        parts: The parts, in order.
        hook: Name of the hook.
        server: State of the server, for the round in a note on an exception.
        args: Arguments of the hook.
    """
    part = None
    try:
        for part in parts:
            getattr(part, hook)(*args)
    except Exception as error:
        locate(error, f"round {server.round}, {type(part).__name__}.{hook}")
        raise


def server_parts(algorithm: FederatedAlgorithm, engine: BaseEngine) -> list[ServerCallback]:
    """Return the server's parts of a method.

    Raises:
        ConfigurationError: The method returns something else than a list of parts.
    """
    found: Any = algorithm.server_callbacks(engine)
    where = f"algorithm: {place_of(algorithm, 'server_callbacks')} returned"
    if found is None:
        raise ConfigurationError(f"{where} None; is a 'return' missing? Return a list, e.g. [WeightedAverage()].")
    if not isinstance(found, (list, tuple)):
        raise ConfigurationError(f"{where} {_kind(found)}; return a list, e.g. [WeightedAverage()].")
    for part in found:
        if isinstance(part, type):
            raise ConfigurationError(f"{where} the class {part.__name__}; return an object of it: {part.__name__}().")
        if not isinstance(part, ServerCallback):
            raise ConfigurationError(f"{where} {_kind(part)} in its list; return objects of ServerCallback's classes.")
    return list(found)


def read_coded(codec: Codec, vector: Tensor, draws: torch.Generator, place: str) -> Tensor:
    """Return what is read of a vector's code; the codec gets a copy, which it may change.

    Args:
        codec: The codec.
        vector: The vector, (d,).
        draws: Its random draws.
        place: The place in the run, for a note on an exception.

    Raises:
        ConfigurationError: The codec returned no such vector.
    """
    try:
        read: Any = codec.decoded(vector.clone(), draws)
    except Exception as error:
        locate(error, place)
        raise
    if not isinstance(read, Tensor) or (read.shape, read.dtype) != (vector.shape, vector.dtype):
        kind = f" of {read.dtype}" if isinstance(read, Tensor) else ""
        raise ConfigurationError(
            f"trainer.codec: {place_of(codec, 'decoded')} returned {_kind(read)}{kind} for a vector of shape "
            f"{tuple(vector.shape)} of {vector.dtype}; return one of the same shape and dtype ({place})."
        )
    return read.to(vector.device)


def checked_bytes(codec: Codec, value: Any) -> int:
    """Return the number of bytes that a codec has returned.

    Raises:
        ConfigurationError: It is no whole number of at least 0.
    """
    if not _is_count(value):
        raise ConfigurationError(
            f"trainer.codec: {place_of(codec, 'num_bytes')} returned {_kind(value)}; return a whole number of bytes."
        )
    return int(value)


def checked_count(algorithm: FederatedAlgorithm, method: str, value: Any) -> int:
    """Return the number of steps or exchanges that a method of the algorithm has returned.

    Raises:
        ConfigurationError: It is no whole number of at least 0.
    """
    if not _is_count(value):
        raise _not_returned(algorithm, method, value, "a whole number")
    return int(value)


def _is_count(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and value >= 0


def checked_model(algorithm: FederatedAlgorithm, method: str, value: Any, size: int) -> Tensor:
    """Return the model (d + b,) that a method of the algorithm has returned.

    Raises:
        ConfigurationError: It is no vector of this size.
    """
    if not isinstance(value, Tensor) or value.shape != (size,):
        raise _not_returned(algorithm, method, value, f"a model, a vector of {size} elements (d + b)")
    return value


def _not_returned(algorithm: FederatedAlgorithm, method: str, value: Any, expected: str) -> ConfigurationError:
    missing = "; is a 'return' missing?" if value is None else ";"
    return ConfigurationError(
        f"algorithm: {place_of(algorithm, method)} returned {_kind(value)}{missing} "
        f"{'R' if value is None else 'r'}eturn {expected}."
    )


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r}" if isinstance(value, (int, float, str)) else f"an object of {type(value).__name__}"


def _who(cohort: Cohort) -> str:
    ids = cohort.ids
    if len(ids) == 1:
        return f"client {ids[0]}"
    return f"clients {', '.join(map(str, ids[:3]))}" + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
