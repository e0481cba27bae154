"""Tunes settings on validation data held out of the training data: by grid, or by Optuna in an interval."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import pandas as pd

from fedbc_lightning.core.errors import ConfigurationError, needs
from fedbc_lightning.core.files import write
from fedbc_lightning.run.lock import locked
from fedbc_lightning.studies.methods import Method, Range
from fedbc_lightning.studies.numbers import csv_text
from fedbc_lightning.studies.statistics import evaluated
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run, State

# Number of combinations that Optuna is asked for at once; fixed, because its choices depend on it.
AT_ONCE = 4

# Successive halving keeps one of this many combinations for the next rung.
KEPT = 3

Values = dict[str, Any]
# Yields a rung, an index into ``Tuning.rungs``, and combinations to try; is sent their scores, NaN for a failed run, in
# the same order; returns the best combination.
Search = Generator[tuple[int, list[Values]], list[float], Values]


def tune(study: Study, do: Callable[[Sequence[Run]], list[State]]) -> dict[tuple[str, str], Values]:
    """Choose the values of each tuned algorithm in each variant, and write ``tuning.csv``.

    Args:
        study: The study whose settings are tuned.
        do: Function that does runs and returns their states; it skips finished runs.

    Raises:
        ConfigurationError: No combination of some algorithm gave a number.
    """
    methods = {method.name: method for method in study.methods if method.tuned}
    if not methods:
        return {}
    searches = {
        (variant, name): (optuna_search if method.has_interval else grid_search)(study, method)
        for variant in study.variants for name, method in methods.items()
    }  # fmt: skip
    asked = {place: next(search) for place, search in searches.items()}
    chosen: dict[tuple[str, str], Values] = {}
    tried: dict[tuple[str, str], list[dict[str, Any]]] = {place: [] for place in searches}
    # All searches advance in step: a batch of one algorithm alone would leave workers idle at the end of each rung.
    while asked:
        runs = {
            (place, k, seed): study.trial(place[0], methods[place[1]], seed, values, rung)
            for place, (rung, batch) in asked.items()
            for k, values in enumerate(batch)
            for seed in study.tuning.seeds
        }
        states = dict(zip(runs, do(list(runs.values())), strict=True))
        for place, (rung, batch) in list(asked.items()):
            scores = [_score((states[place, k, seed] for seed in study.tuning.seeds), study.tuning_metric)
                      for k in range(len(batch))]  # fmt: skip
            tried[place] += [{**values, "rung": rung, study.tuning_metric: score}
                             for values, score in zip(batch, scores, strict=True)]  # fmt: skip
            try:
                asked[place] = searches[place].send(scores)
            except StopIteration as end:
                chosen[place] = end.value
                del asked[place]
    rows = [{"variant": variant, "algorithm": name, **row, "chosen": row.items() >= chosen[variant, name].items()}
            for (variant, name), found in tried.items() for row in found]  # fmt: skip
    with locked(study.folder):
        write(study.results_folder / "tuning.csv", csv_text(pd.DataFrame(rows)))
    return chosen


def _score(states: Iterable[State], metric: str) -> float:
    """Return the mean over the seeds of the last evaluated value; NaN if a run failed or does not log the metric."""
    values = []
    for state in states:
        if state.status != "finished" or metric not in state.run.record.metrics:
            return math.nan
        values.append(float(evaluated(state.run.record.metrics)[metric].iloc[-1]))
    return sum(values) / len(values)


def rungs(study: Study, method: Method) -> list[tuple[int, int]]:
    """Return pairs of a rung and its number of combinations; where few are left, the last rung follows at once."""
    if not method.tuned:
        return []
    if method.has_interval:
        return [(0, study.tuning.trials)]
    last, count = len(study.tuning.rungs) - 1, len(list(method.grid()))
    found: list[tuple[int, int]] = []
    while not found or found[-1][0] < last:
        found.append((last if count <= KEPT else len(found), count))
        count = -(-count // KEPT)
    return found


def _ranked(study: Study, method: Method, tried: Iterable[tuple[Values, float]]) -> list[Values]:
    """Return combinations, the best first; equal ones stay in the order of asking.

    Raises:
        ConfigurationError: Every combination failed.
    """
    scored = [(values, score) for values, score in tried if not math.isnan(score)]
    if not scored:
        raise ConfigurationError(
            f"algorithms.{method.name}: no combination gave a {study.tuning_metric}; see each log.txt in tuning/."
        )
    sign = 1 if study.is_lower_better(study.tuning_metric) else -1
    return [values for values, _ in sorted(scored, key=lambda pair: sign * pair[1])]


def grid_search(study: Study, method: Method) -> Search:
    """Try all combinations; then, rung by rung, the best third of them for more rounds (successive halving).

    References:
        Jamieson & Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization"; with a
        third in place of a half, as in Hyperband.
    """
    best = list(method.grid())
    for rung, count in rungs(study, method):
        batch = best[:count]
        scores = yield rung, batch
        best = _ranked(study, method, zip(batch, scores, strict=True))
    return best[0]


def optuna_search(study: Study, method: Method) -> Search:
    """Search with Optuna's tree-structured Parzen estimator; its seed is fixed so that a resumed study repeats it."""
    with needs(f"algorithms.{method.name}: intervals need Optuna", "optuna", ", or give a grid."):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=0, constant_liar=True)  # for asking in batches
    direction = "minimize" if study.is_lower_better(study.tuning_metric) else "maximize"
    search = optuna.create_study(sampler=sampler, direction=direction)
    tried: list[tuple[Values, float]] = []
    while len(tried) < study.tuning.trials:
        trials = [search.ask() for _ in range(min(AT_ONCE, study.tuning.trials - len(tried)))]
        batch = [{key: _suggest(trial, key, wanted) for key, wanted in method.tuned.items()} for trial in trials]
        scores = yield 0, batch
        for trial, values, score in zip(trials, batch, scores, strict=True):
            state = optuna.trial.TrialState.FAIL if math.isnan(score) else None
            search.tell(trial, None if state else score, state)
            tried.append((values, score))
    return _ranked(study, method, tried)[0]


def _suggest(trial: Any, key: str, wanted: Range) -> Any:
    if wanted.grid is not None:
        return trial.suggest_categorical(key, wanted.grid)
    return trial.suggest_float(key, wanted.low, wanted.high, log=wanted.log)
