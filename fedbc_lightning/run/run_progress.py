"""How far a run has come, and the numbers that it has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.evaluation.summary import Evaluation


@dataclass
class Progress:
    """What changes while a run goes on; users and callbacks read it as attributes of the trainer.

    Attributes:
        current_round: Number of the round that is under way.
        finished_round: Number of the last round that was committed.
        should_stop: Whether the run ends after the current round; callbacks and the module may set it.
        callback_metrics: The last value of each metric by its name.
        evaluation: The last evaluation.
        log_dir: The run folder; None before a run has one.
        loggers: Lightning's loggers of the run.
        num_rows: Number of rows of each table in the checkpoint from which the run resumes.
    """

    current_round: int = 0
    finished_round: int = 0
    should_stop: bool = False
    callback_metrics: dict[str, Tensor] = field(default_factory=dict)
    evaluation: Evaluation = field(default_factory=Evaluation)
    log_dir: str | None = None
    loggers: list[Any] = field(default_factory=list)
    num_rows: dict[str, int] = field(default_factory=dict)

    @property
    def logger(self) -> Any:
        """First logger; None if there is none."""
        return self.loggers[0] if self.loggers else None

    def of_next_run(self) -> Progress:
        """Return the progress with which the trainer's next run begins.

        The folder, the loggers and the evaluation of this run are shown until the next one has its own.
        """
        return Progress(evaluation=self.evaluation, log_dir=self.log_dir, loggers=self.loggers)

    def without_loggers(self) -> Progress:
        """Return a copy that can be sent to another process, which loggers cannot."""
        return replace(self, loggers=[])

    def restore(self, saved: Mapping[str, Any], max_rounds: int) -> None:
        """Go on from a checkpoint.

        Args:
            saved: Our part of the checkpoint.
            max_rounds: T; a run that was stopped early goes on if T is larger now.
        """
        self.current_round = self.finished_round = saved["round"]
        self.should_stop = saved["should_stop"] and max_rounds <= saved["max_rounds"]
        self.num_rows = saved.get("rows", {})
        self.callback_metrics = {name: torch.tensor(value) for name, value in saved["callback_metrics"].items()}

    def write_to(self, folder: str, loggers: list[Any]) -> None:
        """Show where the run writes."""
        self.log_dir, self.loggers = folder, loggers

    def begin_round(self) -> int:
        """Begin the round after the last finished one, and return its number."""
        self.current_round = self.finished_round + 1
        return self.current_round

    def finish_round(self) -> None:
        """Take down that the current round was committed."""
        self.finished_round = self.current_round

    def roll_back(self) -> None:
        """Forget a round that was not committed."""
        self.current_round = self.finished_round

    def publish(self, metrics: Mapping[str, float]) -> None:
        """Show new values of metrics to callbacks."""
        self.callback_metrics |= {name: torch.tensor(value) for name, value in metrics.items()}
