"""Shows the progress of a run over its rounds, then a table and the run's folder."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.fabric.loggers import TensorBoardLogger
from lightning.pytorch import Callback, LightningModule
from rich.console import Console
from rich.table import Table

from fedbc_lightning.callbacks.progress_views import View, make_view
from fedbc_lightning.core.lightning_names import both
from fedbc_lightning.core.metric_names import EPSILON, HELDOUT, TRAIN_LOSS, Measured, measured, train_name
from fedbc_lightning.core.units import decimals, duration
from fedbc_lightning.distributed.interrupts import StoppedError
from fedbc_lightning.module.collector import plain_name
from fedbc_lightning.module.monitors import is_of_evaluation
from fedbc_lightning.run.folder import how_to_go_on

if TYPE_CHECKING:
    from fedbc_lightning.run.trainer_attributes import RunView

NUM_SHOWN = 4
"""Number of key numbers that are shown while a run goes on; the table at its end has all of them."""


class RoundProgressBar(Callback):
    """Shows rounds and numbers live on a terminal or in a notebook, else in plain lines, and a table at the end.

    Args:
        plain_every_n_seconds: Least seconds between two plain lines; the first and the last round always have one.

    Attributes:
        has_told_how_to_resume: Whether the user of a terminal was told how an interrupted run is resumed.
    """

    def __init__(self, plain_every_n_seconds: float = 5.0) -> None:
        self.plain_every_n_seconds = plain_every_n_seconds
        self.has_told_how_to_resume = False
        self._console: Console | None = None
        self._view: View | None = None
        self._first: dict[str, float] = {}
        self._is_interrupted = False

    def on_train_start(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Describe the run, and open the display."""
        if not trainer.is_global_zero:
            return
        self._console, self._started = Console(highlight=False), time.perf_counter()
        self._first_round, self._is_interrupted, self.has_told_how_to_resume = trainer.current_round, False, False
        self._first = key_numbers(trainer)
        self._view = make_view(self._console, trainer, describe(trainer), self.plain_every_n_seconds)

    def on_validation_end(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Remember and show the initial model's numbers."""
        if self._view is not None and trainer.current_round == self._first_round:
            self._first = key_numbers(trainer)
            self._view.show(trainer, shown_numbers(trainer))

    def on_round_end(self, trainer: RunView, pl_module: LightningModule) -> None:
        """Show the numbers of the finished round."""
        if self._view is not None:
            self._view.show(trainer, shown_numbers(trainer))

    def on_exception(self, trainer: RunView, pl_module: LightningModule, exception: BaseException) -> None:  # type: ignore[override]
        """Leave the terminal as it was."""
        self._close(trainer, f"{type(exception).__name__} after round {trainer.current_round}/{trainer.max_rounds}")
        self._is_interrupted = isinstance(exception, (KeyboardInterrupt, StoppedError))

    def on_train_end(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Print the table, the run folder, how to go on, and the command that shows the curves."""
        if self._console is None:
            return
        rounds, last = trainer.current_round - self._first_round, trainer.current_round
        if rounds:
            self._close(trainer, f"{rounds} round{'s' * (rounds != 1)}{', stopped early' * trainer.should_stop}")
        else:
            self._close(trainer, f"Nothing to train: round {last} of trainer.max_rounds={trainer.max_rounds} is done")
        if rounds and not self._console.is_jupyter:  # there ``fit`` returns a result that shows itself
            self._console.print(self._summary(trainer))
        self._say_where(trainer, max_rounds=2 * trainer.max_rounds)

    def teardown(self, trainer: RunView, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]
        """Print where an interrupted run lies and how to go on; only now is its last checkpoint written."""
        self._close(trainer, "Stopped")  # an interrupt after the last round reaches no other hook
        if self._is_interrupted and trainer.log_dir is not None:
            self.has_told_how_to_resume = self._say_where(trainer)
        self._is_interrupted = False

    def _close(self, trainer: RunView, what: str) -> None:
        if self._view is not None and self._console is not None:
            folder = f" · run folder {trainer.log_dir}" if self._console.is_jupyter else ""
            self._view.close(f"{what} in {duration(time.perf_counter() - self._started)}{folder}")
            self._view = None

    def _say_where(self, trainer: RunView, max_rounds: int | None = None) -> bool:
        """Print the run folder and how to go on; return whether a terminal shows how to go on."""
        if self._console is None or self._console.is_jupyter:
            return False
        resume = how_to_go_on(Path(trainer.log_dir or ""), max_rounds)
        said = {"Run folder:": str(trainer.log_dir), "Go on:": resume}
        if any(isinstance(logger, both(TensorBoardLogger)) for logger in trainer.loggers):
            said["Curves:"] = f"tensorboard --logdir {shlex.quote(str(trainer.default_root_dir))}"
        for title, text in said.items():
            if text is not None:  # soft: a terminal breaks the line, and what is copied from it is still one line
                self._console.print(f"{title:<12} {text}", markup=False, soft_wrap=True)
        return resume is not None and self._console.is_terminal

    def _summary(self, trainer: RunView) -> Table:
        table = Table()
        table.add_column("")
        table.add_column(f"round {self._first_round}", justify="right")
        table.add_column(f"round {trainer.current_round}", justify="right")
        for name, value in key_numbers(trainer).items():
            table.add_row(name, decimals(self._first[name]) if name in self._first else "", decimals(value))
        return table


def describe(trainer: RunView) -> str:
    """Describe the run: algorithm, model, clients and rounds in one line, then notes on missing metrics."""
    federation, data = trainer.federation, trainer.datamodule
    participation, num_clients = federation.participation, len(data.training_clients)
    tested = np.count_nonzero(data.num_samples("test")[data.training_clients])
    parts = [
        f"{federation.algorithm}",
        f"{type(federation.user.module).__name__} ({trainer.layout.num_parameters:,} parameters)",
        f"{len(participation.clients)} clients, {participation.num_sampled} per round"
        + f", {len(data.heldout)} held out" * bool(len(data.heldout)),
        f"{trainer.max_rounds} rounds"
        + f" on {trainer.world_size} processes" * (trainer.world_size > 1)
        + f", resumed after round {trainer.current_round}" * (trainer.current_round > 0),
    ]
    notes = []
    if not federation.local_models.exist and not federation.algorithm.trains_pooled:
        notes.append(
            "No .../local metrics: all clients' models would take over 64 MiB; keep_local_models=true keeps them."
        )
    if trainer.eval_clients == 0:
        notes.append("Clients are not evaluated one by one (no .../local, no .../worst10): trainer.eval_clients is 0.")
    elif 0 < tested < num_clients:
        notes.append(f"{tested:,} of the {num_clients:,} clients have test data: .../local, .../worst10 are theirs.")
    elif not tested and data.pooled_dataset("test") is not None:
        notes.append("No .../local, .../worst10, evaluation.csv: the test data is shared, no client has its own.")
    elif not tested:
        notes.append("No test data: nothing is evaluated. The data bring none, and none was cut off the clients' own.")
    return "\n".join([" · ".join(parts), *notes])


def key_numbers(trainer: RunView) -> dict[str, float]:
    """Return the key numbers by name, the most telling first: metrics of the evaluation, losses last."""
    metrics: dict[str, Any] = trainer.callback_metrics
    found = [what for what in map(measured, metrics) if what is not None and what.split == "test"]
    by_place = {place: [what.metric for what in found if what.place == place] for place in ("global", "local")}
    logged = by_place["global"] or by_place["local"]  # no model is everyone's where clients keep parts of their own
    logged.sort(key=lambda name: "loss" in name)
    places = ("global", "local", "worst10", *HELDOUT)
    names = [TRAIN_LOSS, *(Measured(name, place).name for name in logged for place in places), EPSILON]
    return {name: float(metrics[name]) for name in names if name in metrics}


def shown_numbers(trainer: RunView) -> str:
    """Return the first key numbers, ε if it is spent, and what the module logs with ``prog_bar=True``."""
    metrics: dict[str, Any] = trainer.callback_metrics
    numbers = key_numbers(trainer)
    shown = {name: value for k, (name, value) in enumerate(numbers.items()) if k < NUM_SHOWN or name == EPSILON}
    for logged in trainer.federation.user.log.on_screen:
        # self.log of a training step writes train/NAME, that of an evaluation NAME/global.
        plain = plain_name(logged)
        names = [Measured(plain, split="val").name, Measured(plain).name]
        if not is_of_evaluation(logged):
            names = [logged, train_name(plain), *names]
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            shown[name] = float(metrics[name])
    return "  ".join(
        f"{name} {value:.4f}" if abs(value) < 1000 else f"{name} {value:.4g}" for name, value in shown.items()
    )
