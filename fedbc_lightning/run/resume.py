"""Finds the checkpoint from which a run goes on, and tells the user how to go on after a run that broke off."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run import slurm


def find_checkpoint(ckpt_path: str | os.PathLike | None, experiment: Path, fn: TrainerFn) -> Path | None:
    """Return the checkpoint that the user means; None if the run begins anew.

    Args:
        ckpt_path: Path of a checkpoint, or ``last``, or None.
        experiment: Folder of all runs of this name, in which ``last`` is looked for.
        fn: The verb; a training run may begin anew if there is no ``last``.

    Raises:
        ConfigurationError: There is no ``last.ckpt`` to evaluate.
    """
    before = slurm.checkpoint_before(experiment) if fn == TrainerFn.FITTING else None
    if before is not None:
        rank_zero_info(f"SLURM: this job was requeued, and goes on from '{before}'.")
        return before
    if ckpt_path != "last":
        return None if ckpt_path is None else Path(ckpt_path)
    found = run_folder.last_checkpoint(experiment)
    if found is None and fn != TrainerFn.FITTING:
        raise ConfigurationError(f"ckpt_path: there is no last.ckpt under '{experiment}'.")
    if found is None:
        rank_zero_info(f"No last.ckpt under '{experiment}': starting at round 0.")
    return found


def how_to_resume(last: Path | None) -> str:
    """Return a sentence that tells the user how to resume a run that broke off.

    Args:
        last: Path of the run's ``last.ckpt``, which may not exist; None if the run writes none.
    """
    if last is None or not last.is_file():
        return "There is no checkpoint to go on from."
    return f"Go on by the same command with ckpt_path: {last}"
