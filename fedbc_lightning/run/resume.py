"""Tells the user how to resume a run that broke off."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.trainer.states import TrainerFn

from fedbc_lightning.run import folder as run_folder


def how_to_resume(last: Path | None) -> str:
    """Return a sentence that tells the user how to resume a run that broke off.

    Args:
        last: Path of the run's ``last.ckpt``, which may not exist; None if the run writes none.
    """
    if last is None or not last.is_file():
        return "There is no checkpoint to go on from."
    return f"Go on by the same command with ckpt_path: {last}"


def how_to_resume_last(fn: TrainerFn, experiment: Path, log_dir: str | None) -> str:
    """Return the sentence of :func:`how_to_resume` for the run that a trainer is in, or was in last.

    Args:
        fn: The verb; only training runs can be resumed.
        experiment: Folder of all runs of this name.
        log_dir: The run folder; None if it is not known yet, so that the newest run of this name is meant.
    """
    if fn != TrainerFn.FITTING:
        return how_to_resume(None)
    return how_to_resume(run_folder.last_checkpoint(experiment) if log_dir is None else Path(log_dir, run_folder.LAST))
