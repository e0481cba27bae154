"""Shows the progress of a run over its rounds, then a table and the run's folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.fabric.loggers import TensorBoardLogger
from lightning.pytorch import Callback, LightningModule
from rich.console import Console
from rich.table import Table

from fedbc_lightning.callbacks.live_lines import LiveLines, Numbers, Pace
from fedbc_lightning.callbacks.screen import Screen
from fedbc_lightning.core.lightning_names import both
from fedbc_lightning.core.metric_names import EPSILON, HELDOUT, TRAIN_LOSS, Measured, measured, train_name
from fedbc_lightning.core.units import decimals
from fedbc_lightning.distributed.interrupts import StoppedError
from fedbc_lightning.module.collector import plain_name
from fedbc_lightning.module.monitors import OF_TEST, OF_VALIDATION
from fedbc_lightning.run.folder import how_to_go_on

if TYPE_CHECKING:
    from fedbc_lightning.data import FederatedDataModule
    from fedbc_lightning.run.trainer_attributes import RunView

NO_CLIENTS = "\nClients are not evaluated one by one (no .../local, no .../worst10): trainer.eval_clients is 0."


class RoundProgressBar(Callback):
    """Shows a live display of rounds, clients and numbers, or plain lines without a terminal, and a table at the end.

    Args:
        plain_every_n_seconds: Least seconds between two plain lines; the first and the last round always have one.

    Attributes:
        has_told_how_to_resume: Whether the user of a terminal was told how an interrupted run is resumed.
    """

    def __init__(self, plain_every_n_seconds: float = 5.0) -> None:
        self.plain_every_n_seconds = plain_every_n_seconds
        self.has_told_how_to_resume = False
        self._console: Console | None = None
        self._screen: Screen | None = None
        self._last_line = 0.0
        self._first: dict[str, float] = {}
        self._is_interrupted = False

    def on_train_start(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Describe the run, and open the live display."""
        if not trainer.is_global_zero:
            return
        self._console = Console(highlight=False)
        self._first_round, self._is_interrupted, self.has_told_how_to_resume = trainer.current_round, False, False
        self._first = _numbers(trainer)
        self._console.print(describe(trainer), soft_wrap=True)
        self._pace = Pace(trainer.current_round, trainer.max_rounds, lambda: trainer.federation.bench.work)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._screen = Screen(self._console, LiveLines(self._pace, trainer.world_size))
            self._screen.lines.numbers = _live_numbers(trainer)
            self._screen.open()

    def on_round_start(self, trainer: RunView, pl_module: LightningModule) -> None:
        """Show that a round begins."""
        if self._console is not None:
            self._pace.begin_round()

    def on_validation_start(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Show that models are evaluated."""
        if self._console is not None:
            self._pace.begin_evaluation()

    def on_validation_end(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Remember the initial model's numbers."""
        if self._console is None:
            return
        self._pace.end_evaluation()
        if trainer.current_round == self._first_round:
            self._first = _numbers(trainer)
            if self._screen is not None:
                self._screen.lines.numbers = _live_numbers(trainer)
            else:
                self._console.print(f"round {trainer.current_round:>4}  {_line(trainer)}", soft_wrap=True)

    def on_round_end(self, trainer: RunView, pl_module: LightningModule) -> None:
        """Show the numbers of the finished round."""
        if self._console is None:
            return
        self._pace.end_round(trainer.current_round)
        if self._screen is not None:
            self._screen.lines.numbers = _live_numbers(trainer)
            return
        now = self._pace.seconds
        is_last = trainer.current_round == trainer.max_rounds
        if is_last or not self._last_line or now - self._last_line >= self.plain_every_n_seconds:
            self._last_line = now
            self._console.print(
                f"round {trainer.current_round:>4}/{trainer.max_rounds}  {_line(trainer)}  {now:.0f} s", soft_wrap=True
            )

    def on_exception(self, trainer: RunView, pl_module: LightningModule, exception: BaseException) -> None:  # type: ignore[override]
        """Leave the terminal as it was."""
        self._close()
        self._is_interrupted = isinstance(exception, (KeyboardInterrupt, StoppedError))

    def on_train_end(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Print the table, the run folder, how to go on, and the command that shows the curves."""
        if self._console is None:
            return
        self._close()
        if trainer.current_round > self._first_round:
            rounds = trainer.current_round - self._first_round
            self._console.print(f"{rounds} round{'s' * (rounds != 1)} in {self._pace.seconds:.1f} s")
            self._console.print(self._summary(trainer))
        elif trainer.current_round >= trainer.max_rounds:
            self._console.print(
                f"Nothing to train: round {trainer.current_round} of trainer.max_rounds={trainer.max_rounds} is done."
            )
        if trainer.should_stop:
            self._console.print(f"Stopped early, after round {trainer.current_round}.")
        self._say_where(trainer, max_rounds=2 * trainer.max_rounds)

    def teardown(self, trainer: RunView, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]
        """Print where an interrupted run lies and how to go on; only now is its last checkpoint written."""
        self._close()  # an interrupt after the last round reaches no other hook
        if self._is_interrupted and self._console is not None and trainer.log_dir is not None:
            self.has_told_how_to_resume = self._say_where(trainer) and self._console.is_terminal
        self._is_interrupted = False

    def _say_where(self, trainer: RunView, max_rounds: int | None = None) -> bool:
        """Print the run folder, how to go on, and how to see the curves; return whether the run can go on."""
        assert self._console is not None
        resume = how_to_go_on(Path(trainer.log_dir or ""), max_rounds)
        said = {"Run folder:": [str(trainer.log_dir)]}
        if resume is not None:
            said["Go on:"] = _before_options(resume)
        if any(isinstance(logger, both(TensorBoardLogger)) for logger in trainer.loggers):
            said["Curves:"] = ["tensorboard", f"--logdir {shlex.quote(str(trainer.default_root_dir))}"]
        width = self._console.width if self._console.is_terminal else None
        for title, parts in said.items():
            self._console.print(_titled(title, parts, width), markup=False, soft_wrap=True)
        return resume is not None

    def _close(self) -> None:
        if self._screen is not None:
            self._screen.close()
            self._screen = None

    def _summary(self, trainer: RunView) -> Table:
        table = Table()
        table.add_column("")
        table.add_column(f"round {self._first_round}", justify="right")
        table.add_column(f"round {trainer.current_round}", justify="right")
        last = _numbers(trainer)
        for name, value in last.items():
            first = decimals(self._first[name]) if name in self._first else ""
            table.add_row(name, first, decimals(value))
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
    heldout = f", {len(trainer.datamodule.heldout)} held out" * bool(len(trainer.datamodule.heldout))
    missing += NO_CLIENTS if trainer.eval_clients == 0 else _describe_test_data(trainer.datamodule)
    return (
        f"{federation.algorithm} · {type(federation.user.module).__name__} "
        f"({layout.num_parameters:,} parameters) · {len(federation.participation.clients)} clients, "
        f"{federation.participation.num_sampled} per round{heldout} · {trainer.max_rounds} rounds"
        f"{processes}{resumed}{missing}"
    )


def _titled(title: str, parts: list[str], width: int | None) -> str:
    r"""Return a path or command behind its title; below it, and with a line for each part, if a terminal is narrow.

    Args:
        title: What the text is.
        parts: A path alone, or a command that is cut before its options.
        width: Number of columns of the terminal; None if a line may have any length.

    Example:
        >>> _titled("Go on:", ["fit", "--ckpt_path a/b"], 32)
        'Go on:       fit --ckpt_path a/b'
        >>> print(_titled("Go on:", ["fit", "--ckpt_path a/b", "--rounds 4"], 40))
        Go on:
          fit --ckpt_path a/b --rounds 4
        >>> print(_titled("Go on:", ["fit", "--ckpt_path a/b", "--rounds 4"], 24))
        Go on:
          fit \
            --ckpt_path a/b \
            --rounds 4
    """
    text = " ".join(parts)
    line = f"{title:<12} {text}"
    if width is None or len(line) <= width:
        return line
    if len(f"  {text}") > width:
        text = " \\\n    ".join(parts)
    return f"{title}\n  {text}"


def _before_options(command: str) -> list[str]:
    """Cut a command before each of its options, but not within quotes.

    Example:
        >>> _before_options("fit --ckpt_path 'a --b/c d' --rounds 4")
        ['fit', "--ckpt_path 'a --b/c d'", '--rounds 4']
    """
    return re.split(r""" (?=--)(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""", command)


def _describe_test_data(data: FederatedDataModule) -> str:
    """Return a line on clients without test data of their own; empty if all have some."""
    num_clients = len(data.training_clients)
    num_tested = np.count_nonzero(data.num_samples("test")[data.training_clients])
    if num_tested == num_clients:
        return ""
    if num_tested:
        return f"\n{num_tested:,} of the {num_clients:,} clients have test data: .../local, .../worst10 are theirs."
    if data.pooled_dataset("test") is not None:
        return "\nNo .../local, .../worst10, evaluation.csv: the test data is shared, no client has its own."
    return "\nNo test data: nothing is evaluated. The data bring none, and none was cut off the clients' own."


def _numbers(trainer: RunView) -> dict[str, float]:
    """Return the key numbers by name, the most telling first: metrics of the evaluation, losses last."""
    metrics: dict[str, Any] = trainer.callback_metrics
    found = [what for what in map(measured, metrics) if what is not None and what.split == "test"]
    by_place = {place: [what.metric for what in found if what.place == place] for place in ("global", "local")}
    logged = by_place["global"] or by_place["local"]  # no model is everyone's where clients keep parts of their own
    logged.sort(key=lambda name: "loss" in name)
    places = ("global", "local", "worst10", *HELDOUT)
    names = [TRAIN_LOSS, *(Measured(name, place).name for name in logged for place in places), EPSILON]
    return {name: float(metrics[name]) for name in names if name in metrics}


def _line(trainer: RunView) -> str:
    """Return the numbers of a plain line: the four that tell most, and what the module shows on progress bars."""
    numbers = _numbers(trainer)
    shown = dict(list(numbers.items())[:4])
    spent = {EPSILON: numbers[EPSILON]} if EPSILON in numbers else {}
    return "  ".join(_texts(shown | spent | _asked(trainer)))


def _live_numbers(trainer: RunView) -> Numbers:
    """Return the last numbers for the live display."""
    numbers, asked = _numbers(trainer), _asked(trainer)
    places = {name: found for name in numbers if (found := measured(name)) is not None}
    title = next((found.metric for found in places.values()), "")
    first = {name: found.place for name, found in places.items() if found.metric == title}
    more = {name: value for name, value in numbers.items() if name not in first and name not in asked}
    return Numbers(
        title=title,
        key=[f"{place} {_shown(numbers[name])}" for name, place in first.items()],
        asked=_texts({name: value for name, value in asked.items() if name not in first}),
        more=_texts(more),
    )


def _asked(trainer: RunView) -> dict[str, float]:
    """Return by name what the module logs with ``prog_bar=True``, as of the last round that logged it."""
    metrics: dict[str, Any] = trainer.callback_metrics
    found = {}
    for logged in trainer.federation.user.names_on_screen:
        name = next((name for name in _names_of(logged) if name in metrics), None)
        if name is not None:
            found[name] = float(metrics[name])
    return found


def _names_of(logged: str) -> list[str]:
    """Return the names under which a value of ``self.log`` may be found: of training, of validation, of test."""
    plain = plain_name(logged)
    names = [train_name(plain), Measured(plain, split="val").name, Measured(plain).name]
    return names[1:] if logged.startswith((*OF_VALIDATION, *OF_TEST)) else [logged, *names]


def _texts(numbers: dict[str, float]) -> list[str]:
    return [f"{name} {_shown(value)}" for name, value in numbers.items()]


def _shown(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"
