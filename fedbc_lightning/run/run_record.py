"""What a run has left in its folder, each file read at most once; ``trainer.fit`` returns such a record."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import yaml

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean, in_one_line
from fedbc_lightning.core.files import IDENTITY, AnyPath, read, read_mapping
from fedbc_lightning.core.metric_names import (
    KEY_PLACES,
    TRAIN_LOSS,
    Measured,
    is_lower_better,
    is_of_validation,
    measured,
)
from fedbc_lightning.core.units import decimals, duration
from fedbc_lightning.module.monitors import name_in_log
from fedbc_lightning.run.folder import LAST, TABLES, method_of, run_folders
from fedbc_lightning.run.identity import Identity
from fedbc_lightning.run.tables import complete_lines

if TYPE_CHECKING:  # training must not wait for pandas, which takes half a second to import
    import pandas as pd
    from matplotlib.axes import Axes

NOT_RECORDED = "not recorded"

Mode = Literal["min", "max"]


# Types of what is read of ``partition.json``, which may come from somebody else.
PARTITION = {
    "hash": str, "sizes": dict[str, list[int]] | None, "label_histogram": list[list[int]] | None,
    "client_names": list[str] | None, "class_names": list[str] | None, "heldout_clients": list[int],
}  # fmt: skip


@dataclass(frozen=True)
class RunRecord:
    """A run folder; a file that is missing is an empty table, mapping or text.

    Attributes:
        folder: Run folder, such as ``runs/digits/FedBC-0``.
        last_round: Last round that counts, so that what a resumed run adds later is left out; None: all rounds count.
    """

    folder: Path
    last_round: int | None = None

    @classmethod
    def newest(cls, experiment: Path) -> RunRecord | None:
        """Return the run of an experiment that wrote a row last; None if none has written one."""
        found = [folder for folder in run_folders(experiment) if (folder / TABLES[0]).is_file()]
        return cls(found[-1]) if found else None

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Table ``metrics.csv``, a row per round."""
        return self._read_table("metrics")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """Table ``clients.csv``, a row per round and sampled client."""
        return self._read_table("clients")

    @cached_property
    def evaluation(self) -> pd.DataFrame:
        """Table ``evaluation.csv``, a row per round and evaluated client."""
        return self._read_table("evaluation")

    def _read_table(self, name: str) -> pd.DataFrame:
        found = read_table(self.folder / f"{name}.csv")
        return found if self.last_round is None or found.empty else found[found["round"] <= self.last_round]

    @cached_property
    def config_text(self) -> str:
        """Text of ``config.yaml``."""
        path = self.folder / "config.yaml"
        with in_one_line(f"'{path}' cannot be read: ", "."):
            return read(path).decode() if path.is_file() else ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of ``config.yaml``."""
        return read_mapping(self.folder / "config.yaml", {"trainer": dict[str, Any] | None}, yaml.safe_load)

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Content of ``partition.json``."""
        found = read_mapping(self.folder / "partition.json", PARTITION)
        rows = found.get("label_histogram") or []
        lists = [*(found.get("sizes") or {}).values(), rows, found.get("client_names") or []]
        if len({*map(len, filter(None, lists))}) > 1 or len({*map(len, rows)}) > 1:
            raise ConfigurationError(f"'{self.folder}/partition.json' cannot be read: its lists differ in length.")
        return found

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What ``run.json`` says of settings, code and data."""
        return read_mapping(self.folder / IDENTITY, get_type_hints(Identity) | {"device": str})

    @property
    def missing(self) -> list[str]:
        """Names of the files that the run should have written and that are not there."""
        trainer = self.config.get("trainer") or {}
        is_off = 0 in (trainer.get("eval_clients"), trainer.get("eval_every_n_rounds"))
        expected = [*TABLES[: 2 if is_off else 3], "config.yaml", "partition.json"]
        return [name for name in expected if not (self.folder / name).is_file()]

    @property
    def versions(self) -> dict[str, str]:
        """The program's version and the hash of its code, which ``config.yaml`` names in its first lines."""
        comments = [line[1:].split() for line in self.config_text.splitlines()[:2] if line.startswith("#")]
        return {words[0]: " ".join(words[1:]) for words in comments if len(words) > 1}

    @property
    def machine(self) -> dict[str, str]:
        """The version of torch when the run began, and the device on which it was last done."""
        versions = self.identity.get("versions") or {}
        return {"torch": versions.get("torch", NOT_RECORDED), "device": self.identity.get("device", NOT_RECORDED)}

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of config, partition and code, of 12 digits each."""
        config = sha256(self.config_text.encode()).hexdigest()[:12] if self.config_text else NOT_RECORDED
        code = self.versions.get("code", NOT_RECORDED)
        return {"config": config, "partition": self.partition.get("hash", NOT_RECORDED)[:12], "code": code}

    @property
    def num_rounds(self) -> int:
        """Last round in ``metrics.csv``; 0 if no round has ended."""
        return 0 if self.metrics.empty else int(self.metrics["round"].max())

    def written(self) -> tuple[int, list[str]]:
        """Return the last round in ``metrics.csv`` now, also while the run goes on, and the names of its columns."""
        # Read as text: pandas would parse the whole table for each look at its last row.
        lines = complete_lines(self.folder / "metrics.csv").splitlines() or [""]
        round = lines[-1].partition(",")[0]
        return int(round) if round.isdigit() else 0, next(csv.reader(lines), []) if len(lines) > 1 else []

    @property
    def max_rounds(self) -> int | None:
        """Number of rounds that the config asks for; None if it is not known."""
        return (self.config.get("trainer") or {}).get("max_rounds")

    @property
    def num_steps(self) -> int:
        """Number of local steps of all clients in all rounds."""
        return int(self.clients["num_steps"].sum()) if "num_steps" in self.clients else 0

    @property
    def num_samples(self) -> pd.Series:
        """Number of training samples by client that is not held out, the largest number first."""
        import pandas as pd

        sizes = (self.partition.get("sizes") or {}).get("train")
        if sizes is not None:
            found = pd.Series(sizes).drop(self.partition.get("heldout_clients", []), errors="ignore")
        elif {"client", "num_samples"} <= set(self.clients):  # partition.json lists no sizes of very many clients
            found = self.clients.groupby("client")["num_samples"].max()
        else:
            found = pd.Series(dtype=float)
        return found.sort_values(ascending=False, kind="stable")

    def client_name(self, client: int) -> str:
        """Return the name of a client: that of the data, or else its number."""
        names = self.partition.get("client_names") or []
        return names[client] if client < len(names) else f"client {client}"


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
class FitResult(RunRecord):
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

    method: str | None = None
    monitor: str | None = None
    mode: Mode | None = None

    @classmethod
    def read(cls, folder: AnyPath) -> FitResult:
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
        if self.metrics.empty:
            raise ConfigurationError(f"'{self.folder}' holds no metrics.csv; was it removed, or is it elsewhere?")
        return self.metrics.set_index("round")

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
        # Validation data come first, because the value of a round that test data choose is too good; then accuracies.
        trusted = sorted(_of_global_model(self.history), key=lambda name: not is_of_validation(name))
        return self.best_by(trusted[0]) if trusted else None

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
        rounds = {} if rows.empty else {"first": rows.index.min(), "last": rows.index.max()}
        if self.best is not None:
            rounds["best"] = self.best.round
        table = self.history.loc[list(rounds.values()), names].T
        table.columns = [f"{name}: round {round}" for name, round in rounds.items()]
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
        if not self.folder.is_dir():  # a repr must not raise
            return f"{self.method or 'A run'}: its folder {self.folder} is not there any more"
        here = self.folder.relative_to(Path.cwd()) if self.folder.is_relative_to(Path.cwd()) else self.folder
        times = self.history.reindex(columns=["time/round_seconds", "time/eval_seconds"])
        rounds, took, best = int(self.history.index.max()), duration(float(times.sum().sum())), self.best
        which = "No round was evaluated."
        if best is not None:
            which = f"The best round is that with the {'smallest' if best.mode == 'min' else 'largest'} {best.metric}."
        headline = f"{self.method or 'A run'}: {rounds} round{'s' * (rounds != 1)} in {took}, recorded in {here}"
        return "\n".join([headline, self.summary.to_string(float_format=decimals, na_rep=""), which])

    def _column(self, metric: str) -> pd.Series:
        if metric not in self.history:
            known = [str(name) for name in self.history]
            hint = did_you_mean(metric, known, f"there is: {', '.join(known)}.")
            raise ConfigurationError(f"The run has no metric '{metric}'; {hint}")
        return self.history[metric]


def key_metrics(names: Iterable[str]) -> list[str]:
    """Return the key metrics: of z, of the clients' own models, of the clients that z serves worst, of those held out.

    Example:
        >>> key_metrics(["train/loss", "loss/global", "accuracy/global", "accuracy/local"])
        ['accuracy/global', 'accuracy/local']
        >>> key_metrics(["train/loss", "time/round_seconds"])
        ['train/loss']
    """
    names = list(names)
    # Test data come first here, because this is what a reader wants to know; ``FitResult.best`` has them last.
    for name in sorted(_of_global_model(names), key=is_of_validation):
        metric, _, split = measured(name) or Measured(name)
        metrics = [Measured(metric, place, split).name for place in KEY_PLACES]
        return [metric for metric in metrics if metric in names]
    return [name for name in names if name == TRAIN_LOSS]


def _of_global_model(names: Iterable[str]) -> list[str]:
    """Return the metrics of the global model, accuracies before losses."""
    found = [name for name in names if (metric := measured(name)) is not None and metric.place == "global"]
    return sorted(found, key=is_lower_better)


def read_table(path: Path) -> pd.DataFrame:
    """Read the complete rows of a table, with the names that metrics have today.

    Args:
        path: The table; if there is none, the result is empty.

    Raises:
        ConfigurationError: The file is no table.
    """
    import pandas as pd

    with in_one_line(f"'{path}' cannot be read: ", "."):
        # A run that is being done may have written half of its last row.
        text = complete_lines(path)
        found = pd.read_csv(io.StringIO(text)) if text.strip() else pd.DataFrame()
        if text.strip() and ("round" not in found or (len(found) and found["round"].dtype.kind != "i")):
            raise ValueError("there is no column 'round' of whole numbers")
    return found
