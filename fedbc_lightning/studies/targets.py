"""What it costs each algorithm to reach a value of a metric, such as the simulated seconds to 90 % accuracy."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from fedbc_lightning.studies.numbers import UNITS, Rows, is_share
from fedbc_lightning.studies.study import Study


def target_tables(study: Study, curves: pd.DataFrame) -> Iterable[tuple[str, Rows]]:
    """Yield caption and rows of a table for each metric that has targets, with a column for each of these.

    A cell is the mean ± standard deviation over the seeds that reached the value, of the cost up to the first round
    after which it was measured, and says how many seeds these are if not all did.

    Args:
        study: The study.
        curves: Its curves, from :func:`~fedbc_lightning.studies.results.read_curves`.
    """
    for metric, targets in study.targets.items() if not curves.empty else ():
        sign = "≤" if study.is_lower_better(metric) else "≥"
        rows: Rows = [["", *(f"{sign} {_target(value, metric)}" for value in targets)]]
        for variant in study.variants:
            for method in study.methods:
                mine = curves[(curves["variant"] == variant) & (curves["algorithm"] == method.name)]
                name = method.name if list(study.variants) == ["all"] else f"{variant}: {method.name}"
                rows.append([name, *(_cell(study, mine, metric, value) for value in targets)])
        seeds = f"; mean ± standard deviation over {len(study.seed_list)} seeds" if len(study.seed_list) > 1 else ""
        yield f"{UNITS[study.axis]} until {metric} first reaches a value{seeds}; rounds are those evaluated", rows


def _target(value: float, metric: str) -> str:
    return f"{100 * value:g} %" if is_share(metric) else f"{value:g}"


def _cost(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _cell(study: Study, curves: pd.DataFrame, metric: str, target: float) -> str:
    is_there = curves[metric] <= target if study.is_lower_better(metric) else curves[metric] >= target
    costs = curves[is_there].groupby("seed")[study.axis].min()
    if costs.empty:
        return "never"
    text = _cost(costs.mean())
    text = f"{text} ± {_cost(costs.std())}" if len(costs) > 1 else text
    num_seeds = len(study.seed_list)
    return text if len(costs) == num_seeds else f"{text} ({len(costs)} of {num_seeds} seeds)"
