"""Tunes settings on validation data held out of the training data: by grid, or by Optuna in an interval."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import write_text
from fedbc_lightning.core.metric_names import is_of_validation, on_split
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.reported_round import evaluated
from fedbc_lightning.studies.schedule import State
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run

AT_ONCE = 4
"""Number of combinations that Optuna is asked for at once; fixed, because its choices depend on it."""

TUNED = "tuned.yaml"
"""File in the study's folder with the chosen values."""

KEPT = 3
"""Successive halving keeps one of this many combinations for the next rung."""

Values = dict[str, Any]


def tune(study: Study, do: Callable[[Sequence[Run]], list[State]]) -> dict[tuple[str, str], Values]:
    """Choose the values of each tuned algorithm in each variant, and write ``tuning.csv`` and ``tuned.yaml``.

    Args:
        study: The study whose settings are tuned.
        do: Function that does runs and returns their states; it skips finished runs.

    Raises:
        ConfigurationError: No combination of some algorithm gave a number.
    """
    searches = [
        _search(study, variant, method) for variant in study.variants for method in study.methods if method.tuned
    ]
    if not searches:
        return {}
    metric = validation_metric(study)
    while open_ones := [search for search in searches if not search.is_done]:
        batches = [(search, search.ask()) for search in open_ones]
        runs = {
            (id(search), k, seed): study.trial(search.variant, search.method, seed, values, search.rung)
            for search, batch in batches
            for k, values in enumerate(batch)
            for seed in study.tuning.seeds
        }
        states = {id(state.run): state for state in do(list(runs.values()))}
        for search, batch in batches:
            for k, values in enumerate(batch):
                done = [states[id(runs[id(search), k, seed])] for seed in study.tuning.seeds]
                search.tell(values, _score(done, metric))
    chosen = {(search.variant, search.method.name): search.ranked()[0] for search in searches}
    rows = [
        {"variant": search.variant, "algorithm": search.method.name, **values, "rung": rung, metric: score,
         "chosen": values == chosen[search.variant, search.method.name]}
        for search in searches for rung, values, score in search.tried
    ]  # fmt: skip
    with study.locked():
        write_tried(study.results_folder / "tuning.csv", pd.DataFrame(rows))
        nested = read_tuned(study)  # keep the values that other parts of the study have chosen
        for (variant, name), values in chosen.items():
            nested.setdefault(variant, {})[name] = values
        write_text(study.folder / TUNED, yaml.safe_dump(nested, sort_keys=False))
    return chosen


def read_tuned(study: Study) -> dict[str, dict[str, Values]]:
    """Read the values chosen so far: variant -> algorithm -> setting -> value."""
    path = study.folder / TUNED
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.is_file() else {}


def write_tried(path: Path, tried: pd.DataFrame) -> None:
    """Write ``tuning.csv``: rows of other parts of the study that are there already, then those tried now."""
    if path.is_file() and path.stat().st_size:
        keys, known = ["variant", "algorithm"], pd.read_csv(path, dtype=str, keep_default_na=False)  # names may be "5"
        is_other = ~known.set_index(keys).index.isin(tried.set_index(keys).index)
        tried = pd.concat([known[is_other], tried]) if is_other.any() else tried
    write_text(path, tried.to_csv(index=False))


def validation_metric(study: Study) -> str:
    """Return the metric by which tuning ranks combinations.

    Raises:
        ConfigurationError: It is not measured on validation data.
    """
    metric = study.tuning.metric or on_split(study.metrics[0], "val")
    if not is_of_validation(metric):
        raise ConfigurationError(
            f"tuning.metric: '{metric}' is not measured on validation data; give e.g. accuracy/val_global."
        )
    return metric


def check_tried(study: Study, run: Run) -> None:
    """Raise if a finished tuning run does not log the tuning metric.

    Raises:
        ConfigurationError: The run does not log it.
    """
    metric = validation_metric(study)
    if metric not in run.record.metrics:
        known = ", ".join(filter(is_of_validation, run.record.metrics))
        raise ConfigurationError(f"tuning.metric: {run.title} logs no '{metric}'; there is: {known}.")


def _score(states: Iterable[State], metric: str) -> float:
    """Return the mean over the seeds of the last evaluated value; NaN if a run failed."""
    values = []
    for state in states:
        if state.status != "finished":
            return math.nan
        metrics = state.run.record.metrics
        values.append(float(metrics[metric].loc[evaluated(metrics).index[-1]]))
    return sum(values) / len(values)


@dataclass
class Search:
    """Base class of searches over the combinations of one algorithm in one variant.

    Attributes:
        variant: Name of the variant.
        method: The algorithm with its ranges.
        metric: Metric by which combinations are ranked.
        is_lower_better: Whether small values of the metric are good.
        tried: Tuples of rung, combination and score, which is NaN if a run failed.
        rung: Current rung, an index into :attr:`Tuning.rungs <fedbc_lightning.studies.methods.Tuning.rungs>`.
        is_done: Whether there is nothing left to ask for.
    """

    variant: str
    method: Method
    metric: str
    is_lower_better: bool
    tried: list[tuple[int, Values, float]] = field(default_factory=list)
    rung: int = 0

    is_done = False

    def ask(self) -> list[Values]:
        """Return the combinations to try next."""
        raise NotImplementedError

    def tell(self, values: Values, score: float) -> None:
        """Record the score of a combination; scores come in the order of :meth:`ask`."""
        self.tried.append((self.rung, values, score))

    def ranked(self) -> list[Values]:
        """Return the combinations of the last rung, the best first; equal ones stay in the order of asking.

        Raises:
            ConfigurationError: Every combination of the rung failed.
        """
        scored = [(values, score) for rung, values, score in self.tried if rung == self.rung and not math.isnan(score)]
        if not scored:
            raise ConfigurationError(
                f"algorithms.{self.method.name}: none of {len(self.tried)} combinations gave a {self.metric} in "
                f"{self.variant}; see the log.txt of its runs in tuning/."
            )
        sign = 1 if self.is_lower_better else -1
        return [values for values, _ in sorted(scored, key=lambda pair: sign * pair[1])]


def rungs(count: int, num_rungs: int) -> list[tuple[int, int]]:
    """Return pairs of a rung and its number of combinations; where few are left, the last rung follows at once.

    Example:
        >>> rungs(30, 3), rungs(5, 3), rungs(2, 3), rungs(30, 1)
        ([(0, 30), (1, 10), (2, 4)], [(0, 5), (2, 2)], [(2, 2)], [(0, 30)])
    """
    found = []
    for rung in range(num_rungs):
        is_last = count <= KEPT or rung == num_rungs - 1
        found.append((num_rungs - 1 if is_last else rung, count))
        if is_last:
            break
        count = -(-count // KEPT)
    return found


class GridSearch(Search):
    """Tries all combinations; then, rung by rung, the best third of them for more rounds (successive halving).

    Args:
        *args: Arguments of :class:`Search`.
        num_rungs: Number of rungs.

    References:
        Jamieson & Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization"; with a
        third in place of a half, as in Hyperband.
    """

    def __init__(self, *args: Any, num_rungs: int) -> None:
        super().__init__(*args)
        self._left = rungs(len(list(self.method.grid())), num_rungs)

    def ask(self) -> list[Values]:
        """Return all combinations on the first rung, later the best third of those tried last."""
        asked = self.ranked() if self.tried else list(self.method.grid())
        self.rung, count = self._left.pop(0)
        self.is_done = not self._left
        return asked[:count]


class OptunaSearch(Search):
    """Searches with Optuna's tree-structured Parzen estimator; its seed is fixed so that a resumed study repeats it.

    Args:
        *args: Arguments of :class:`Search`.
        trials: Number of combinations to try.
    """

    def __init__(self, *args: Any, trials: int) -> None:
        super().__init__(*args)
        try:
            import optuna
        except ModuleNotFoundError:
            raise ConfigurationError(
                f"algorithms.{self.method.name}: an interval is searched by Optuna: pip install "
                "'fedbc-lightning[optuna]', or give a grid."
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=0, constant_liar=True)  # for asking in batches
        direction = "minimize" if self.is_lower_better else "maximize"
        self._optuna, self._study = optuna, optuna.create_study(sampler=sampler, direction=direction)
        self._asked: list[Any] = []
        self._trials = trials

    def ask(self) -> list[Values]:
        """Return the next :data:`AT_ONCE` suggestions of Optuna, or as many as are left."""
        count = min(AT_ONCE, self._trials - len(self.tried))
        self._asked = [self._study.ask() for _ in range(count)]
        self.is_done = len(self.tried) + count >= self._trials
        return [self._suggest(trial) for trial in self._asked]

    def tell(self, values: Values, score: float) -> None:
        """Record a score and report it to Optuna; a NaN is reported as a failed trial."""
        super().tell(values, score)
        failed = self._optuna.trial.TrialState.FAIL
        trial = self._asked.pop(0)
        self._study.tell(trial, state=failed) if math.isnan(score) else self._study.tell(trial, score)

    def _suggest(self, trial: Any) -> Values:
        values = {}
        for key, wanted in self.method.tuned.items():
            if wanted.grid is not None:
                values[key] = trial.suggest_categorical(key, wanted.grid)
            else:
                values[key] = trial.suggest_float(key, wanted.low, wanted.high, log=wanted.log)
        return values


def _search(study: Study, variant: str, method: Method) -> Search:
    metric = validation_metric(study)
    what = variant, method, metric, study.is_lower_better(metric)
    if all(values.grid is not None for values in method.tuned.values()):
        return GridSearch(*what, num_rungs=len(study.tuning.rungs))
    if len(study.tuning.rungs) > 1:
        raise ConfigurationError("tuning.max_rounds: an interval is searched with one T; a list of them is for grids.")
    return OptunaSearch(*what, trials=study.tuning.trials)
