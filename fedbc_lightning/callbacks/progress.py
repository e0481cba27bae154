"""Shows the progress of a run over its rounds, then a table and the run's folder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.fabric.loggers import TensorBoardLogger
from lightning.pytorch import Callback, LightningModule
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from fedbc_lightning.core.metric_names import TRAIN_LOSS, Measured, measured
from fedbc_lightning.core.twins import both

if TYPE_CHECKING:
    from fedbc_lightning.data import FederatedDataModule
    from fedbc_lightning.run.view import RunView

NO_CLIENTS = "\nClients are not evaluated one by one (no .../local, no .../worst10): trainer.eval_clients is 0."


class RoundProgressBar(Callback):
    """Shows a bar over rounds with the key numbers, or plain lines without a terminal, and a table at the end.

    Args:
        plain_every_n_seconds: Least seconds between two plain lines; the first and the last round always have one.
    """

    def __init__(self, plain_every_n_seconds: float = 5.0) -> None:
        self.plain_every_n_seconds = plain_every_n_seconds
        self._console: Console | None = None
        self._progress: Progress | None = None
        self._last_line = 0.0
        self._first: dict[str, float] = {}

    def on_train_start(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Describe the run, and open the bar."""
        if not trainer.is_global_zero:
            return
        self._console = Console(highlight=False)
        self._started, self._first_round = time.perf_counter(), trainer.current_round
        self._first = _numbers(trainer)
        self._console.print(describe(trainer), soft_wrap=True)
        if self._console.is_terminal:
            whole: dict[str, Any] = {"no_wrap": True, "overflow": "ignore"}
            self._progress = Progress(
                TextColumn("round", table_column=Column(**whole)),
                MofNCompleteColumn(table_column=Column(min_width=len(f"{trainer.max_rounds}") * 2 + 1, **whole)),
                BarColumn(bar_width=12),
                TimeElapsedColumn(table_column=Column(min_width=7, **whole)),
                TextColumn("<"),
                TimeRemainingColumn(table_column=Column(min_width=7, **whole)),
                # In a narrow terminal the last numbers are cut, never the round.
                TextColumn("{task.fields[numbers]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
                console=self._console,
                expand=True,
            )
            self._task = self._progress.add_task(
                "rounds", total=trainer.max_rounds, completed=trainer.current_round, numbers=""
            )
            self._progress.start()

    def on_validation_end(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Remember the initial model's numbers."""
        if self._console is not None and trainer.current_round == self._first_round:
            self._first = _numbers(trainer)
            if self._progress is None:
                self._console.print(f"round {trainer.current_round:>4}  {_line(self._first)}", soft_wrap=True)

    def on_round_end(self, trainer: RunView, pl_module: LightningModule) -> None:
        """Show the numbers of the finished round."""
        if self._console is None:
            return
        line = _line(_numbers(trainer))
        if self._progress is not None:
            self._progress.update(self._task, completed=trainer.current_round, numbers=line)
            return
        now = time.perf_counter()
        is_last = trainer.current_round == trainer.max_rounds
        if is_last or now - self._last_line >= self.plain_every_n_seconds:
            self._last_line = now
            self._console.print(
                f"round {trainer.current_round:>4}/{trainer.max_rounds}  {line}  {now - self._started:.0f} s",
                soft_wrap=True,
            )

    def on_exception(self, trainer: RunView, pl_module: LightningModule, exception: BaseException) -> None:  # type: ignore[override]
        """Leave the terminal as it was."""
        self._stop()

    def on_train_end(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Print the table, the run folder and the command that shows the curves."""
        if self._console is None:
            return
        self._stop()
        if trainer.current_round > self._first_round:
            self._console.print(self._summary(trainer))
        elif trainer.current_round >= trainer.max_rounds:
            self._console.print(
                f"Nothing to train: round {trainer.current_round} of trainer.max_rounds={trainer.max_rounds} is done."
            )
        if trainer.should_stop:
            self._console.print(f"Stopped early, after round {trainer.current_round}.")
        self._console.print(f"Run folder:  {trainer.log_dir}", soft_wrap=True)
        if any(isinstance(logger, both(TensorBoardLogger)) for logger in trainer.loggers):
            self._console.print(f"Curves:      tensorboard --logdir {trainer.default_root_dir}", soft_wrap=True)

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _summary(self, trainer: RunView) -> Table:
        rounds = trainer.current_round - self._first_round
        seconds = time.perf_counter() - self._started
        table = Table(title=f"{rounds} round{'s' * (rounds != 1)} in {seconds:.1f} s", title_justify="left")
        table.add_column("")
        table.add_column(f"round {self._first_round}", justify="right")
        table.add_column(f"round {trainer.current_round}", justify="right")
        last = _numbers(trainer)
        for name, value in last.items():
            first = f"{self._first[name]:.4f}" if name in self._first else ""
            table.add_row(name, first, f"{value:.4f}")
        return table


def describe(trainer: RunView) -> str:
    """Describe the run: algorithm, model, clients and rounds in one line, then notes on missing metrics."""
    federation, layout = trainer.federation, trainer.layout
    processes = f" on {trainer.world_size} processes" if trainer.world_size > 1 else ""
    resumed = f", resumed after round {trainer.current_round}" if trainer.current_round else ""
    missing = ""
    if not federation.local_models.exist and not federation.algorithm.trains_pooled:
        missing = (
            "\nNo .../local metrics: all clients' models would take over 64 MiB; keep_local_models=true keeps them."
        )
    missing += NO_CLIENTS if trainer.eval_clients == 0 else _describe_test_data(trainer.datamodule)
    return (
        f"{federation.algorithm} · {type(federation.user.module).__name__} "
        f"({layout.num_parameters:,} parameters) · {trainer.datamodule.num_clients} clients, "
        f"{federation.participation.num_sampled} per round · {trainer.max_rounds} rounds{processes}{resumed}{missing}"
    )


def _describe_test_data(data: FederatedDataModule) -> str:
    """Return a line on clients without test data of their own; empty if all have some."""
    num_tested = np.count_nonzero(data.num_samples("test"))
    if num_tested == data.num_clients:
        return ""
    if num_tested:
        return (
            f"\n{num_tested:,} of the {data.num_clients:,} clients have test data: .../local, .../worst10 are theirs."
        )
    if data.pooled_dataset("test") is not None:
        return "\nNo .../local, .../worst10, evaluation.csv: the test data is shared, no client has its own."
    return "\nNo test data: nothing is evaluated. The data bring none, and none was cut off the clients' own."


def _numbers(trainer: RunView) -> dict[str, float]:
    """Return the key numbers by name, the most telling first: metrics of the evaluation, losses last."""
    metrics: dict[str, Any] = trainer.callback_metrics
    logged = [found.metric for found in map(measured, metrics) if found and found == Measured(found.metric)]
    logged.sort(key=lambda name: "loss" in name)
    places = ("global", "local", "worst10")
    names = [TRAIN_LOSS, *(Measured(name, place).name for name in logged for place in places)]
    return {name: float(metrics[name]) for name in names if name in metrics}


def _line(numbers: dict[str, float]) -> str:
    return "  ".join(f"{_label(name)} {value:.4f}" for name, value in list(numbers.items())[:4])


def _label(name: str) -> str:
    """Return a short label of a metric, e.g. ``global acc`` for ``accuracy/global``.

    Example:
        >>> _label("accuracy/global"), _label("acc/worst10"), _label("train/loss")
        ('global acc', 'worst 10 % acc', 'train loss')
    """
    name, found = name.replace("accuracy", "acc"), measured(name)
    if found is None:
        return name.replace("/", " ")
    place = "worst 10 %" if found.place == "worst10" else found.place
    return f"{place} {found.metric.replace('accuracy', 'acc')}"
