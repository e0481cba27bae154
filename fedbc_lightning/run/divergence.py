"""Finds out from the rows of ``metrics.csv`` whether training made the model worse, as far as that is certain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedbc_lightning.core.metric_names import GLOBAL, TRAIN_LOSS, Measured, is_lower_better, measured

GROWN = 2.0
"""Least factor by which the global loss has grown: that of a model that overfits grows, too, but not in training."""
BEYOND_MEASURE = 1000.0
"""Least factor by which the training loss has grown if there is no global loss to tell that it was the clients."""
HELP = (
    "Try a smaller learning rate or server step, trainer.gradient_clip_val: 1, or inputs near unit scale "
    "(data.standardize of tables)."
)

Values = list[tuple[int, float]]
"""Values of a metric, each with its round."""


def divergence(rows: Sequence[Mapping[str, str]]) -> str | None:
    """Return a sentence on how the loss of a run diverged, and what to try; None if that is not certain.

    Clients differ, so a training loss of other clients may be larger; and the global loss of a model that overfits
    grows. So both must have grown.

    Args:
        rows: Rows of ``metrics.csv`` as texts by name; an empty text is a metric that the round does not have.
    """
    losses = {name: _values(rows, name) for name in (rows[0] if rows else []) if _is_loss(name)}
    since = {name: round for name, values in losses.items() if (round := _not_finite_since(values)) is not None}
    overall = Measured("loss").name
    shown = [name for name in losses if losses[name] and name in (TRAIN_LOSS, overall, *since)]
    if since:
        verdict = f"is not finite from round {min(since.values())} on"
    elif _has_grown(losses.get(TRAIN_LOSS, []), losses.get(overall, [])):
        verdict = "grew in training"
    else:
        return None
    ends = [f"{name} from {losses[name][0][1]:.4g} to {losses[name][-1][1]:.4g}" for name in shown]
    return f"The loss {verdict}: {', '.join(ends)}. {HELP}"


def _is_loss(name: str) -> bool:
    """Return whether a name is the training loss, or an error of the model that everyone has."""
    found = measured(name)
    return name == TRAIN_LOSS or (found is not None and found.place in GLOBAL and is_lower_better(name))


def _values(rows: Sequence[Mapping[str, str]], name: str) -> Values:
    return [(int(row["round"]), float(row[name])) for row in rows if row[name]]


def _not_finite_since(values: Values) -> int | None:
    """Return the first round from which on no value is finite; None if the last value is."""
    since = None
    for round, value in reversed(values):
        if math.isfinite(value):
            break
        since = round
    return since


def _has_grown(train: Values, overall: Values) -> bool:
    least = 1.0 if overall else BEYOND_MEASURE
    return bool(train) and _growth(train) > least and (not overall or _growth(overall) >= GROWN)


def _growth(values: Values) -> float:
    first, last = values[0][1], values[-1][1]
    return last / first if first > 0 else 0.0
