"""Shows the progress of a run in a notebook: one output that is updated in place."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule

from fedbc_lightning.callbacks.progress_bar import describe
from fedbc_lightning.core.notebook import NotebookOutput
from fedbc_lightning.core.units import decimals, duration
from fedbc_lightning.run.result import key_metrics

if TYPE_CHECKING:
    from fedbc_lightning.run.trainer_attributes import RunView


class NotebookProgressBar(Callback):
    """Shows a bar over rounds with the key numbers in one output of a notebook's cell.

    A run is shown with it in place of :class:`RoundProgressBar` where the program is a notebook: a terminal's bar would
    leave an output for every line.

    Args:
        seconds_between_updates: Least seconds between two updates; the first and the last state are always shown.
    """

    def __init__(self, seconds_between_updates: float = 0.2) -> None:
        self.seconds_between_updates = seconds_between_updates
        self._output: NotebookOutput | None = None
        self._description: list[str] = []
        self._started = self._shown = 0.0
        self._first_round = 0

    def on_train_start(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Describe the run, and show the empty bar."""
        if not trainer.is_global_zero:
            return
        self._output, self._description = NotebookOutput(), describe(trainer).splitlines()
        self._started, self._first_round = time.perf_counter(), trainer.current_round
        self._show_bar(trainer)

    def on_round_end(self, trainer: RunView, pl_module: LightningModule) -> None:
        """Show the numbers of the finished round."""
        now = time.perf_counter()
        if self._output is not None and now - self._shown >= self.seconds_between_updates:
            self._shown = now
            self._show_bar(trainer)

    def on_exception(self, trainer: RunView, pl_module: LightningModule, exception: BaseException) -> None:  # type: ignore[override]
        """Say where the run has stopped."""
        self._end(trainer, f"{type(exception).__name__} after round {trainer.current_round}/{trainer.max_rounds}")

    def on_train_end(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Replace the bar by the last numbers and the run folder."""
        rounds = trainer.current_round - self._first_round
        stopped = ", stopped early" if trainer.should_stop else ""
        self._end(trainer, f"{rounds} round{'s' * (rounds != 1)}{stopped}")

    def _end(self, trainer: RunView, what: str) -> None:
        if self._output is None:
            return
        took = duration(time.perf_counter() - self._started)
        text = " · ".join([f"{what} in {took}", *_numbers(trainer), f"run folder {trainer.log_dir}"])
        self._output.show([*self._description, text])
        self._output = None

    def _show_bar(self, trainer: RunView) -> None:
        assert self._output is not None
        done, all_rounds = trainer.current_round, trainer.max_rounds
        took = time.perf_counter() - self._started
        here = done - self._first_round
        left = f", about {duration(took * (all_rounds - done) / here)} left" if here and done < all_rounds else ""
        text = " · ".join([f"round {done}/{all_rounds}", f"{duration(took)}{left}", *_numbers(trainer)])
        self._output.show([*self._description, text], share=done / max(1, all_rounds))


def _numbers(trainer: RunView) -> list[str]:
    metrics: dict[str, Any] = trainer.callback_metrics
    return [f"{name} {decimals(float(metrics[name]))}" for name in key_metrics(metrics)]
