"""Keeps the checkpoint of the best round."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.core.checks import checked
from fedbc_lightning.core.files import AnyPath, told
from fedbc_lightning.run.trainer_attributes import RunView
from fedbc_lightning.state import checkpoint


@checked("trainer.callbacks: RoundCheckpoint")
class RoundCheckpoint(Checkpoint):
    """Keeps the checkpoint of the best round by a logged metric as ``checkpoints/best.ckpt``.

    ``last.ckpt``, from which a run resumes, is written without this callback.

    Args:
        monitor: Metric that is compared: a column of ``metrics.csv``, e.g. ``accuracy/global``, or the name that
            the module logs, e.g. ``val_loss``, for the metric of the global model; None: every evaluated round is
            written over the one before, or every round where none is evaluated.
        mode: ``min`` if small values are better, ``max`` if large ones are.
        filename: Name of the checkpoint file.
        dirpath: Folder of the file, or the URL of one in an object store, such as ``s3://bucket/mnist``; None:
            ``checkpoints/`` in the run folder.
    """

    def __init__(
        self,
        monitor: str | None = "accuracy/global",
        mode: Literal["min", "max"] = "max",
        filename: str = "best.ckpt",
        dirpath: AnyPath | None = None,
    ) -> None:
        self.monitor = monitor
        self.mode = mode
        self.filename = filename
        self.dirpath = dirpath
        self.best: float | None = None
        self.best_round: int | None = None

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint; a resumed run may have another ``dirpath``."""
        return f"{type(self).__qualname__} {self.monitor} {self.mode} {self.filename}"

    def on_validation_end(self, trainer: RunView, pl_module: LightningModule) -> None:  # type: ignore[override]
        """Write a checkpoint if the round is the best so far; called after each round that has logged the metric.

        ``trainer.validate`` calls this hook, too, and then nothing is written: it does no round.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        value = None if self.monitor is None else float(trainer.callback_metrics[self.monitor])
        is_best = value is None or self.best is None or (value > self.best if self.mode == "max" else value < self.best)
        if is_best:
            self.best, self.best_round = value, trainer.current_round
            if trainer.is_global_zero and trainer.enable_checkpointing:
                content = trainer.recorder.checkpoint()
                folder = Path(self.dirpath or Path(trainer.recorder.folder, "checkpoints"))
                with told(folder, setting="RoundCheckpoint: dirpath"), trainer.recorder.disk_told():
                    checkpoint.save_atomically(content, folder / self.filename)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its round."""
        return {"best": self.best, "best_round": self.best_round}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value and its round."""
        self.best, self.best_round = state_dict["best"], state_dict["best_round"]
