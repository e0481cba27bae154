"""Finds state of a method that is not declared, which no checkpoint holds: a resumed run would go on without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.module.shared_state import Budget
from fedbc_lightning.server import ServerCallback

NUM_ROUNDS = 5
"""Number of rounds after which attributes are no longer compared: state changes in every round."""


class UndeclaredState:
    """Prints once which attributes of a method and its server parts change from round to round.

    The first round is not compared, since values that are computed once, when they are first needed, are no state.
    Neither are booleans, which say that something was said.

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
        if self._num_rounds >= NUM_ROUNDS:
            return
        self._num_rounds += 1
        before, self._after = self._after, self._described()
        changed = [name for name, now in self._after.items() if self._num_rounds > 1 and before.get(name) != now]
        if self._num_rounds == NUM_ROUNDS or changed:
            self._num_rounds, self._after = NUM_ROUNDS, {}
        if changed:
            rank_zero_info(_line(changed, self._values()))

    def _values(self) -> dict[str, Any]:
        return {f"{type(owner).__name__}.{key}": value for owner in self._owners for key, value in vars(owner).items()}

    def _described(self) -> dict[str, Any]:
        left = Budget(map(id, self._owners))
        return {name: left.describe(value) for name, value in self._values().items() if not isinstance(value, bool)}


def _line(changed: Sequence[str], values: dict[str, Any]) -> str:
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    name, value = changed[0].partition(".")[2], values[changed[0]]
    kind = "vector" if isinstance(value, Tensor) else "scalar"
    return (
        f"algorithm: {', '.join(changed[:3])}{more} changed from one round to the next and is not declared: no "
        "checkpoint holds it, so a resumed run loses it. Declare it in declare_state with "
        f"state.server_{kind}('{name}'), read server['{name}'] and write server.stage('{name}', value); state of "
        f"clients is state.client_{kind}. If it is not needed after its round, set it to None in on_round_end (see "
        "docs/howto/new_method.md; said once)."
    )
