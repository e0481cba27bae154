"""Shows the progress of a run over its rounds: live on a terminal or in a notebook, or in plain lines."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.loggers import TensorBoardLogger
from lightning.pytorch import Callback, LightningModule
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from fedbc_lightning.core.checks import checked
from fedbc_lightning.core.devices import device_name, tf32_used
from fedbc_lightning.core.lightning_names import both
from fedbc_lightning.core.metric_names import EPSILON, KEY_PLACES, TRAIN_LOSS, Measured, measured, train_name
from fedbc_lightning.core.printing import Console, NotebookOutput, stream_handlers
from fedbc_lightning.core.units import decimals, duration
from fedbc_lightning.distributed.interrupts import Interrupts, StoppedError
from fedbc_lightning.module.collector import plain_name
from fedbc_lightning.module.monitors import is_of_evaluation
from fedbc_lightning.run.folder import how_to_go_on
from fedbc_lightning.run.trainer_attributes import RunView

UPDATES_PER_SECOND = 5


class PlainView:
    """Prints a line for a round, at most one in some seconds; the first and the last round always have one."""

    def __init__(self, console: Console, seconds_between_lines: float) -> None:
        self._console, self._pause = console, seconds_between_lines
        self._started, self._last_line = time.perf_counter(), 0.0

    def show(self, trainer: RunView, numbers: str) -> None:
        """Print a line, unless the last one is too young."""
        now = time.perf_counter()
        is_at_an_end = trainer.current_round in (0, 1, trainer.max_rounds)
        if is_at_an_end or now - self._last_line >= self._pause:
            self._last_line = now
            where = f"round {trainer.current_round:>4}/{trainer.max_rounds}"
            self._console.print(f"{where}  {numbers}  {now - self._started:.0f} s", soft_wrap=True)

    def close(self, last: str) -> None:
        """Print how the run ended."""
        self._console.print(last)


class NotebookView:
    """Updates one output of the notebook's cell, because a notebook keeps every line that is printed.

    ``rich.live`` would need ipywidgets there, and its output would not be in the notebook's file.
    """

    def __init__(self, description: str) -> None:
        self._output, self._lines = NotebookOutput(), [*description.splitlines(), "round 0"]
        self._started, self._first_round, self._shown = time.perf_counter(), -1, 0.0
        self._output.show(self._lines, share=0.0)

    def show(self, trainer: RunView, numbers: str) -> None:
        """Show bar, times and numbers; a fast run is not slowed down by its display."""
        now, done = time.perf_counter(), trainer.current_round
        self._first_round = done if self._first_round < 0 else self._first_round
        took, here = now - self._started, done - self._first_round
        left = f", about {duration(took * (trainer.max_rounds - done) / here)} left" if here else ""
        self._lines[-1] = f"round {done}/{trainer.max_rounds} · {duration(took)}{left} · {numbers}"
        if now - self._shown >= 1 / UPDATES_PER_SECOND:
            self._shown = now
            self._output.show(self._lines, share=done / max(1, trainer.max_rounds))

    def close(self, last: str) -> None:
        """Replace the bar by how the run ended."""
        numbers = self._lines[-1].rpartition(" · ")[2]
        self._output.show([*self._lines[:-1], f"{last} · {numbers}"])


class TerminalView:
    """Draws rounds, clients, steps per second and times again and again; what is printed appears above them.

    The thread of ``rich.live`` reads how far local training is, so that a round of minutes moves the bar, too.
    """

    _open: TerminalView | None = None

    def __init__(self, console: Console, trainer: RunView) -> None:
        self._trainer, self._numbers, self._notices = trainer, "", list[str]()
        self._progress = Progress(
            TextColumn("round {task.fields[round]:{task.fields[digits]}}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[work]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        shown = {"round": trainer.current_round, "digits": len(str(trainer.max_rounds)), "work": ""}
        self._rounds = self._progress.add_task("", total=trainer.max_rounds, **shown)
        self._steps = self._progress.add_task("", total=None, visible=False, **shown)
        self._streams, self._handlers = (sys.stdout, sys.stderr), list[tuple[logging.StreamHandler, Any]]()
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=UPDATES_PER_SECOND,
            redirect_stderr=sys.stderr.isatty(),  # a file that takes the errors goes on to take them
        )
        self._live.start(refresh=True)
        TerminalView._open = self
        Interrupts.show_by(self._notices.append)  # a signal's handler may only keep what it has to say
        # Loggers keep the stream that they were made with; their lines would be torn by the next drawing.
        replaced = dict(zip(self._streams, (sys.stdout, sys.stderr), strict=True))
        for handler in stream_handlers():
            stream = replaced.get(handler.stream)
            if stream is not None and stream is not handler.stream:
                self._handlers.append((handler, handler.setStream(stream)))

    def show(self, trainer: RunView, numbers: str) -> None:
        """Show the numbers from the next drawing on."""
        self._numbers = numbers

    def close(self, last: str) -> None:
        """Draw for the last time, leave the terminal as it was, and print how the run ended."""
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._live.stop()
        Interrupts.show_by(None)
        TerminalView._open = None
        self._live.console.print(last)

    def leave(self) -> None:
        """Let a forked process print by itself: this one's thread, and who holds its locks, are not in it."""
        sys.stdout, sys.stderr = self._streams
        for handler, stream in self._handlers:
            handler.stream = stream

    def _render(self) -> Group:
        trainer, work = self._trainer, self._trainer.federation.bench.work
        done, of_all = float(trainer.finished_round), f" ×{trainer.world_size}" if trainer.world_size > 1 else ""
        # Everything has its width from the start, so that nothing moves to and fro.
        said = f"client {work.num_begun:{len(str(work.num_clients))}}/{work.num_clients}{of_all}"
        if trainer.current_round > trainer.finished_round:
            done += work.fraction
        else:
            said = " " * len(said)
        self._progress.update(self._steps, completed=work.num_steps)
        speed = self._progress.tasks[self._steps].speed or 0.0
        said += f"{speed:7,.0f} steps/s" if speed >= 10 else f"{speed:7.2g} steps/s"
        self._progress.update(self._rounds, completed=done, round=trainer.current_round, work=said)
        return Group(self._progress, Text(self._numbers), *map(Text, self._notices))


def _leave_in_child() -> None:
    if TerminalView._open is not None:
        TerminalView._open.leave()
        TerminalView._open = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


View = PlainView | NotebookView | TerminalView

# Number of key numbers that are shown while a run goes on; the table at its end has all of them
NUM_SHOWN = 4


@checked("trainer.callbacks: RoundProgressBar")
class RoundProgressBar(Callback):
    """Shows rounds and numbers live on a terminal or in a notebook, else in plain lines, and a table at the end.

    Args:
        plain_every_n_seconds: Least seconds between two plain lines; the first and the last round always have one.
    """

    def __init__(self, plain_every_n_seconds: float = 5.0) -> None:
        self.plain_every_n_seconds = plain_every_n_seconds
        self._console: Console | None = None
        self._view: View | None = None
        self._first: dict[str, float] = {}
        self._is_interrupted = False

    def on_train_start(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Describe the run, and open the display."""
        if not trainer.is_global_zero:
            return
        self._console, self._started = Console(highlight=False), time.perf_counter()
        self._first_round, self._is_interrupted = trainer.current_round, False
        self._first = key_numbers(trainer)
        # The display's thread reads the FederatedTrainer: what the other one is asked counts as read by the module.
        self._view = self._open(self._console, getattr(trainer, "view", trainer))

    def _open(self, console: Console, trainer: RunView) -> View:
        """Show the description of the run, and return the view that suits what the console is."""
        if console.is_jupyter:
            return NotebookView(describe(trainer))
        console.print(describe(trainer), soft_wrap=True)
        if console.is_terminal and not console.is_dumb_terminal:
            return TerminalView(console, trainer)
        return PlainView(console, self.plain_every_n_seconds)

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
        done = f"{rounds} round{'s' * (rounds != 1)}{', stopped early' * trainer.should_stop}"
        nothing = f"Nothing to train: round {last} of trainer.max_rounds={trainer.max_rounds} is done"
        self._close(trainer, done if rounds else nothing)
        if rounds and not self._console.is_jupyter:  # there ``fit`` returns a result that shows itself
            self._console.print(self._summary(trainer))
        self._say_where(trainer, max_rounds=2 * trainer.max_rounds)

    def teardown(self, trainer: RunView, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]
        """Print where an interrupted run lies and how to go on; only now is its last checkpoint written."""
        self._close(trainer, "Stopped")  # an interrupt after the last round reaches no other hook
        if self._is_interrupted and trainer.log_dir is not None:
            self._say_where(trainer)
        self._is_interrupted = False

    def _close(self, trainer: RunView, what: str) -> None:
        if self._view is not None and self._console is not None:
            folder = f" · run folder {trainer.log_dir}" if self._console.is_jupyter else ""
            self._view.close(f"{what} in {duration(time.perf_counter() - self._started)}{folder}")
            self._view = None

    def _say_where(self, trainer: RunView, max_rounds: int | None = None) -> None:
        """Print the run folder, how to go on, and the command that shows the curves."""
        if self._console is None or self._console.is_jupyter:
            return
        resume = how_to_go_on(Path(trainer.log_dir or ""), max_rounds)
        said = {"Run folder:": str(trainer.log_dir), "Go on:": resume}
        if any(isinstance(logger, both(TensorBoardLogger)) for logger in trainer.loggers):
            said["Curves:"] = f"tensorboard --logdir {shlex.quote(str(trainer.default_root_dir))}"
        for title, text in said.items():
            if text is not None:  # soft: a terminal breaks the line, and what is copied from it is still one line
                self._console.print(f"{title:<12} {text}", markup=False, soft_wrap=True)

    def _summary(self, trainer: RunView) -> Table:
        rounds = self._first_round, trainer.current_round
        table = Table("", *(Column(f"round {round}", justify="right") for round in rounds))
        for name, value in key_numbers(trainer).items():
            table.add_row(name, decimals(self._first[name]) if name in self._first else "", decimals(value))
        return table


def describe(trainer: RunView) -> str:
    """Describe the run: algorithm, model, clients and rounds in one line, then notes on missing metrics."""
    federation, data, user = trainer.federation, trainer.datamodule, trainer.federation.user
    participation, num_clients = federation.participation, len(data.training_clients)
    tested = np.count_nonzero(data.num_samples("test")[data.training_clients])
    parts = [
        f"{federation.algorithm}",
        f"{type(user.module).__name__} ({trainer.layout.num_parameters:,} parameters)",
        f"{user.precision.precision} on {device_name(user.device)}{tf32_used(user.device, trainer.layout.dtype)}",
        f"{len(participation.clients)} clients, {participation.num_sampled} per round"
        + f", {len(data.heldout)} held out" * bool(len(data.heldout)),
        f"{trainer.max_rounds} rounds"
        + f" on {trainer.world_size} processes" * (trainer.world_size > 1)
        + f", resumed after round {trainer.current_round}" * (trainer.current_round > 0),
    ]
    notes = []
    if not federation.local_models.exist and not federation.algorithm.trains_pooled:
        notes.append("No .../local metrics: all clients' models take over 64 MiB; keep_local_models=true keeps them.")
    if trainer.eval_clients == 0:
        notes.append("Clients are not evaluated one by one (no .../local, no .../worst10): trainer.eval_clients is 0.")
    elif 0 < tested < num_clients:
        notes.append(f"{tested:,} of the {num_clients:,} clients have test data: .../local, .../worst10 are theirs.")
    elif not tested and data.pooled_dataset("test") is not None:
        notes.append("No .../local, .../worst10, evaluation.csv: the test data is shared, no client has its own.")
    return "\n".join([" · ".join(parts), *notes])


def key_numbers(trainer: RunView) -> dict[str, float]:
    """Return the key numbers by name, the most telling first: metrics of the evaluation, losses last."""
    metrics = trainer.callback_metrics
    found = [what for what in map(measured, metrics) if what is not None and what.split == "test"]
    by_place = {place: [what.metric for what in found if what.place == place] for place in ("global", "local")}
    logged = by_place["global"] or by_place["local"]  # no model is everyone's where clients keep parts of their own
    logged.sort(key=lambda name: "loss" in name)
    names = [TRAIN_LOSS, *(Measured(name, place).name for name in logged for place in KEY_PLACES), EPSILON]
    return {name: float(metrics[name]) for name in names if name in metrics}


def shown_numbers(trainer: RunView) -> str:
    """Return the first key numbers, ε if it is spent, and what the module logs with ``prog_bar=True``."""
    metrics = trainer.callback_metrics
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
    return "  ".join(f"{name} {decimals(value):6}" for name, value in shown.items())
