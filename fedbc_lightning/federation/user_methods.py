"""Calls the methods of algorithms that a user may have written, and checks what they return and leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.described import Budget
from fedbc_lightning.core.errors import ConfigurationError, locate
from fedbc_lightning.core.text import shorten
from fedbc_lightning.engines.base import BaseEngine
from fedbc_lightning.module.mistakes import place_of
from fedbc_lightning.server import ServerCallback
from fedbc_lightning.server.arrived_updates import ArrivedUpdates
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration
from fedbc_lightning.state.cohort import EMPTY

# Number of rounds after which attributes are no longer compared: state changes in every round
NUM_ROUNDS = 5


@contextmanager
def trained(algorithm: FederatedAlgorithm, cohort: Cohort, round: int) -> Iterator[None]:
    """Note on an exception of a method's ``client_update`` whom it trained, and check that it has trained them.

    Raises:
        ConfigurationError: The method has trained nobody.
    """
    try:
        yield
    except Exception as error:
        locate(error, f"{_who(cohort)}, round {round}")
        raise
    if cohort.w is EMPTY:
        raise ConfigurationError(
            f"algorithm: {place_of(algorithm, 'client_update')} trained nobody; call engine.solve(cohort, server.model)"
            " in it."
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
    """Return the server's parts of a method."""
    found: Any = algorithm.server_callbacks(engine)
    is_right = isinstance(found, (list, tuple)) and all(isinstance(part, ServerCallback) for part in found)
    return list(returned(algorithm, "server_callbacks", found, is_right, "a list of parts, e.g. [WeightedAverage()]"))


def declare_state(
    algorithm: FederatedAlgorithm, parts: Sequence[ServerCallback], engine: BaseEngine, num_sampled: int
) -> StateDeclaration:
    """Let the method and its server parts declare what they keep, and check that the parts go together.

    Raises:
        ConfigurationError: A part refuses the engine or the method, no part forms z, or one reads what nobody keeps.
    """
    declaration = StateDeclaration()
    for part in parts:
        part.declare_state(declaration)
        part.check(engine, num_sampled)
    declaration.scalars_of_server = [*declaration.client_scalars]
    algorithm.declare_state(declaration)
    if not any(part.forms_z for part in parts):
        raise ConfigurationError(
            f"algorithm: {type(algorithm).__name__}.server_callbacks has no part that forms z; add e.g. "
            "WeightedAverage (a part of your own sets forms_z = True)."
        )
    waiting = [part for part in parts if isinstance(part, ArrivedUpdates)]
    if waiting and algorithm.buffer_size is None:
        raise ConfigurationError(
            f"algorithm: {type(waiting[0]).__name__} takes updates that arrive from clients in training, but rounds "
            f"of {type(algorithm).__name__} wait for their clients; take FedBuff or FedAsync, or set buffer_size in a "
            "class of your own."
        )
    declared = {**declaration.client_scalars, **declaration.client_vectors}
    for part in parts:
        missing = [name for name in part.reads if name not in declared]
        if missing:
            raise ConfigurationError(
                f"algorithm: {type(part).__name__} reads the client state '{missing[0]}', which nothing "
                f"declares; there is: {', '.join(declared) or 'none'}."
            )
    return declaration


def returned(owner: Any, method: str, value: Any, is_right: bool, expected: str, section: str = "algorithm") -> Any:
    """Return what a user's method returned, if it is right.

    Args:
        owner: The object whose method it is.
        method: Name of the method.
        value: What the method returned.
        is_right: Whether it can be used.
        expected: What is expected, for the message.
        section: Section of the configuration in which the object stands.

    Raises:
        ConfigurationError: The value is not right.
    """
    if is_right:
        return value
    hint = "is a 'return' missing? Return" if value is None else "return"
    raise ConfigurationError(f"{section}: {place_of(owner, method)} returned {_kind(value)}; {hint} {expected}.")


def checked_count(owner: Any, method: str, value: Any, section: str = "algorithm") -> int:
    """Return the number of steps, exchanges or bytes that a method has returned."""
    is_right = hasattr(value, "__index__") and not isinstance(value, bool) and value >= 0
    return int(returned(owner, method, value, is_right, "a whole number", section))


def checked_model(algorithm: FederatedAlgorithm, method: str, value: Any, size: int) -> Tensor:
    """Return the model (d + b,) that a method of the algorithm has returned."""
    is_right = isinstance(value, Tensor) and value.shape == (size,)
    return returned(algorithm, method, value, is_right, f"a model, a vector of {size} elements (d + b)")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} of {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"an object of {type(value).__name__}"


def _who(cohort: Cohort) -> str:
    return f"client{'s' * (len(cohort) > 1)} {shorten(cohort.ids, 3)}"


class UndeclaredState:
    """Prints once which attributes of a method and its server parts change from round to round.

    No checkpoint holds them, so that a resumed run would go on without them. The first round is not compared, since
    values that are computed once, when they are first needed, are no state. Neither are booleans, which say that
    something was said.

    Args:
        algorithm: The method.
        parts: Its server parts.
    """

    def __init__(self, algorithm: FederatedAlgorithm, parts: Sequence[ServerCallback]) -> None:
        self._owners = [*parts, algorithm]
        self._after: dict[str, Any] = {}
        self._num_rounds = 0

    def compare(self) -> None:
        """Compare the attributes with those after the round before; call this after each round."""
        self._num_rounds += 1
        if self._num_rounds > NUM_ROUNDS:
            return
        # Values are described by hashes up to a budget: a part may hold a data set.
        left = Budget(map(id, self._owners))
        before = self._after
        self._after = {
            f"{type(owner).__name__}.{name}": left.describe(value)
            for owner in self._owners
            for name, value in vars(owner).items()
            if not isinstance(value, bool)
        }
        changed = [name for name, now in self._after.items() if before.get(name) != now]
        if changed and self._num_rounds > 1:
            self._num_rounds = NUM_ROUNDS
            name = changed[0].partition(".")[2]
            rank_zero_info(
                f"algorithm: {', '.join(changed[:3])} changed from one round to the next and is not declared: no "
                "checkpoint holds it, so a resumed run loses it. Declare it in declare_state with "
                f"state.server_vector('{name}') or server_scalar, read server['{name}'] and write "
                f"server.stage('{name}', value); state of clients is state.client_vector or client_scalar. If it is "
                "not needed after its round, set it to None in on_round_end (see docs/howto/new_method.md; said once)."
            )
