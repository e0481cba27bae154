"""What a training run has recorded: the value of ``trainer.fit``."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.metric_names import (
    GLOBAL,
    HELDOUT,
    TRAIN_LOSS,
    Measured,
    is_lower_better,
    is_of_validation,
    measured,
)
from fedbc_lightning.core.units import decimals, duration
from fedbc_lightning.module.monitors import name_in_log
from fedbc_lightning.run.folder import LAST, method_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Best:
    """The best round of a run by one metric.

    Attributes:
        round: Number of the round; the first one of equally good ones.
        metric: Metric by which it was chosen, a column of ``metrics.csv``.
        mode: ``min`` if the smallest value was chosen, ``max`` if the largest one was.
        value: Value of that metric in this round.
        values: All metrics of the round by name.
    """

    round: int
    metric: str
    mode: Mode
    value: float
    values: dict[str, float] = field(repr=False)


@dataclass(frozen=True, repr=False)
class FitResult:
    """What a training run has recorded in its folder; tables are read when they are asked for.

    ``trainer.fit`` returns it. ``FitResult.read("runs/digits/FedBC-0")`` reads any run: one that the command line has
    made, one that is still running, or one that was interrupted.

    Attributes:
        folder: Run folder, as an absolute path.
        last_round: Last round of the run when ``fit`` ended, so that what a resumed run adds later is left out; None:
            all rounds count.
        method: Name of the method; None: it is not known.
        monitor: Metric by which :attr:`best` is chosen; None: one of the global model, on validation data if there are
            any, and an accuracy rather than a loss.
        mode: ``min`` if small values of ``monitor`` are better, ``max`` if large ones are; None: as its name tells.
    """

    folder: Path
    last_round: int | None = None
    method: str | None = None
    monitor: str | None = None
    mode: Mode | None = None

    @classmethod
    def read(cls, folder: str | os.PathLike) -> FitResult:
        """Return what a run has recorded so far.

        Raises:
            ConfigurationError: There is no run in the folder.
        """
        place = Path(folder).absolute()
        if not (place / "metrics.csv").is_file():
            raise ConfigurationError(f"folder: '{folder}' is no run folder: it holds no metrics.csv.")
        return cls(place, method=method_of(place))

    @cached_property
    def history(self) -> pd.DataFrame:
        """Metrics of each round, from ``metrics.csv``: the index is the round; round 0 is the initial model."""
        found = self._read("metrics")
        if found.empty:
            raise ConfigurationError(f"'{self.folder}' holds no metrics.csv; was it removed, or is it elsewhere?")
        return found.set_index("round")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """What was recorded of each client in each round that it took part in, from ``clients.csv``."""
        return self._read("clients")

    @cached_property
    def evaluation(self) -> pd.DataFrame:
        """Metrics of each client in each evaluated round, from ``evaluation.csv``; empty if no client was evaluated."""
        return self._read("evaluation")

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Paths of the checkpoints by their names, such as ``last`` and ``best``."""
        return {path.stem: path for path in sorted((self.folder / LAST.parent).glob("*.ckpt"))}

    @property
    def checkpoint(self) -> Path | None:
        """Path of ``last.ckpt``, from which the run resumes; None if there is none."""
        return self.checkpoints.get(LAST.stem)

    @property
    def best(self) -> Best | None:
        """The best round by :attr:`monitor`; None if nothing was evaluated."""
        monitored = name_in_log(self.monitor or "", self.history)
        if monitored in self.history:
            return self.best_by(monitored, self.mode)
        metric = next(iter(_by_trust(self.history)), None)
        return None if metric is None else self.best_by(metric)

    def best_by(self, metric: str, mode: Mode | None = None) -> Best | None:
        """Return the best round by a metric; None if it was never a number.

        Args:
            metric: A column of :attr:`history`.
            mode: ``min`` if small values are better, ``max`` if large ones are; None: as the name of the metric tells.

        Raises:
            ConfigurationError: The run has no such metric.
        """
        values = self._column(metric).dropna()
        mode = mode or ("min" if is_lower_better(metric) else "max")
        if values.empty:
            return None
        round = int(values.idxmin() if mode == "min" else values.idxmax())
        return Best(round, metric, mode, float(values[round]), self.history.loc[round].dropna().to_dict())

    @property
    def summary(self) -> pd.DataFrame:
        """The key metrics at the first, the last and the best evaluated round."""
        names = key_metrics(self.history)
        rows = self.history[names].dropna(how="all")
        rounds = {"first": rows.index.min(), "last": rows.index.max()}
        if self.best is not None:
            rounds["best"] = self.best.round
        table = self.history.loc[list(rounds.values()), names].T if len(rows) else self.history[:0][names].T
        table.columns = [f"{name}: round {round}" for name, round in rounds.items()] if len(rows) else []
        return table

    def plot(self, *metrics: str, ax: Axes | None = None) -> Axes:
        """Draw metrics over the rounds.

        Args:
            *metrics: Columns of :attr:`history`; by default accuracy (or loss where there is none) of the global model,
                of the clients' own models, and of the clients that the global model serves worst.
            ax: Axes to draw on; None: new ones.

        Returns:
            The axes.

        Raises:
            ConfigurationError: The run has no such metric.
        """
        from matplotlib import pyplot  # an extra, and slow to import

        names = list(metrics) or key_metrics(self.history)
        curves = {name: self._column(name).dropna() for name in names}
        if ax is None:
            ax = pyplot.subplots(figsize=(6, 3), layout="constrained")[1]
        for name, curve in curves.items():
            ax.plot(curve.index, curve, label=name, marker="." if len(curve) < 2 else "")
        ax.set(xlabel="round", title=self.method)
        ax.grid(alpha=0.3)
        ax.legend()
        return ax

    def __repr__(self) -> str:
        if not self._is_there:
            return self._headline
        table = self.summary.to_string(float_format=decimals, na_rep="")
        return "\n".join([self._headline, table, self._how_chosen])

    def _repr_html_(self) -> str:
        """Show the run as a table in a notebook."""
        head = f"<div>{html.escape(self._headline)}</div>"
        if not self._is_there:
            return head
        table = self.summary.to_html(float_format=decimals, na_rep="", border=0)
        return f"{head}{table}<div>{html.escape(self._how_chosen)}</div>"

    @property
    def _is_there(self) -> bool:
        return (self.folder / "metrics.csv").is_file() or "history" in vars(self)

    @property
    def _headline(self) -> str:
        here = self.folder.relative_to(Path.cwd()) if self.folder.is_relative_to(Path.cwd()) else self.folder
        if not self._is_there:
            return f"{self.method or 'A run'} in {here}, which holds no metrics.csv (any more)"
        times = self.history.reindex(columns=["time/round_seconds", "time/eval_seconds"])
        rounds = int(self.history.index.max())
        took = duration(float(times.sum().sum()))
        return f"{self.method or 'A run'}: {rounds} round{'s' * (rounds != 1)} in {took}, recorded in {here}"

    @property
    def _how_chosen(self) -> str:
        best = self.best
        if best is None:
            return "No round was evaluated."
        return f"The best round is that with the {'smallest' if best.mode == 'min' else 'largest'} {best.metric}."

    def _column(self, metric: str) -> pd.Series:
        if metric not in self.history:
            known = [str(name) for name in self.history]
            hint = did_you_mean(metric, known, f"there is: {', '.join(known)}.")
            raise ConfigurationError(f"The run has no metric '{metric}'; {hint}")
        return self.history[metric]

    def _read(self, table: str) -> pd.DataFrame:
        from fedbc_lightning.run.run_record import read_table  # here: training must not wait for pandas

        found = read_table(self.folder / f"{table}.csv")
        if self.last_round is None or found.empty:
            return found
        return found[found["round"] <= self.last_round]


def _by_trust(names: Iterable[str]) -> list[str]:
    """Return the metrics of the global model, the most trustworthy first: validation data, then accuracies."""
    found = [name for name in names if _is_global(name)]
    return sorted(found, key=lambda name: (not is_of_validation(name), is_lower_better(name)))


def key_metrics(names: Iterable[str]) -> list[str]:
    """Return the key metrics: of z, of the clients' own models, of the clients that z serves worst, of those held out.

    Example:
        >>> key_metrics(["train/loss", "loss/global", "accuracy/global", "accuracy/local"])
        ['accuracy/global', 'accuracy/local']
        >>> key_metrics(["train/loss", "time/round_seconds"])
        ['train/loss']
    """
    names = list(names)
    # Test data come first here, because this is what a reader wants to know; _by_trust has them last, because a round
    # that is chosen by them would be too good.
    found = sorted(filter(_is_global, names), key=lambda name: (is_of_validation(name), is_lower_better(name)))
    for name in found:
        metric, _, split = measured(name) or Measured(name)
        metrics = [Measured(metric, place, split).name for place in ("global", "local", "worst10", *HELDOUT)]
        return [metric for metric in metrics if metric in names]
    return [name for name in names if name == TRAIN_LOSS]


def _is_global(name: str) -> bool:
    found = measured(name)
    return found is not None and found.place in GLOBAL
