"""The state from which a run begins: that of a checkpoint, of the trainer's last run, or the initial model."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from fedbc_lightning.core.errors import ConfigurationError, nearest
from fedbc_lightning.federation import checkpoint_content
from fedbc_lightning.run import folder as run_folder
from fedbc_lightning.run import slurm
from fedbc_lightning.run.hyper_parameters import hyper_parameters, refuse_other_seed, warn_of_other_settings
from fedbc_lightning.run.lock import RunLock
from fedbc_lightning.run.run import Request, Run
from fedbc_lightning.state import checkpoint, row_file

if TYPE_CHECKING:
    from lightning.fabric import Fabric

log = logging.getLogger(__name__)

MOST_NAMES = 5
"""Number of names of other runs that a warning lists."""


class Beginning(NamedTuple):
    """The state from which a run begins.

    Attributes:
        path: Checkpoint from which the run is restored; None if there is none.
        saved: Content of the checkpoint.
        previous: The trainer's last run with the same module, whose state is evaluated if there is no checkpoint.
    """

    path: Path | None
    saved: dict[str, Any] | None
    previous: Run | None


def find_beginning(request: Request, experiment: Path, fabric: Fabric, lock: RunLock, last: Run | None) -> Beginning:
    """Find and read the checkpoint from which a run is restored, and lock its run folder if the run goes on there.

    Args:
        request: What the user asks for.
        experiment: Folder of all runs of this name.
        fabric: Fabric that has been launched.
        lock: Locks the run folder.
        last: The trainer's last run; its state counts only if it was a run of the same module.

    Raises:
        ConfigurationError: There is no such checkpoint, it cannot be read, or another process writes to its run.
    """
    fn = request.fn
    path = fabric.broadcast(_find_checkpoint(request.ckpt_path, experiment, fn))
    folder = None if path is None else run_folder.run_of(path)
    if folder is not None and fn == TrainerFn.FITTING and fabric.is_global_zero:
        lock.take(folder)  # first: another process could replace the checkpoint while this one reads it
    is_same = last is not None and last.user.module is request.model
    return Beginning(path, None if path is None else checkpoint.load(path), last if is_same else None)


def begin(run: Run, beginning: Beginning, *, takes_other_seed: bool) -> None:
    """Give a run the state from which it begins; a training run without a checkpoint begins with the initial model.

    Args:
        run: Run that has been set up.
        beginning: The state from which it begins.
        takes_other_seed: Whether it may resume with another seed than that of its checkpoint.
    """
    if beginning.saved is not None:
        _restore(run, beginning.saved, takes_other_seed=takes_other_seed)
    elif run.fn == TrainerFn.FITTING:
        return
    elif beginning.previous is not None:
        checkpoint_content.adopt(run.federation, beginning.previous.federation)
    else:
        rank_zero_info("No ckpt_path: the model is evaluated as it is, and stands for every client's too.")


def _restore(run: Run, saved: dict[str, Any], *, takes_other_seed: bool) -> None:
    ours = saved[checkpoint.KEY]
    state, module, path = ours["federation"], run.user.module, run.path
    checkpoint_content.prepare_for(run.federation, state, path or "")
    saved["state_dict"] = checkpoint_content.with_frozen_parameters(
        run.federation, saved["state_dict"], ours.get("frozen", {}), path or ""
    )
    module.on_load_checkpoint(saved)
    rows_path = None if path is None else path.with_name(row_file.NAME)
    checkpoint_content.load_state(run.federation, state, saved["state_dict"], path, rows_path)
    run.progress.restore(ours, run.settings.max_rounds)
    if run.fn == TrainerFn.FITTING and not takes_other_seed:
        refuse_other_seed(ours["settings"], run.seed, path)
    warn_of_other_settings(ours["settings"], hyper_parameters(run))
    states = saved["callbacks"]
    for callback in run.hooks.callbacks:
        run.hooks.call_callback(callback, "on_load_checkpoint", saved)
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])


def _find_checkpoint(ckpt_path: str | os.PathLike | None, experiment: Path, fn: TrainerFn) -> Path | None:
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
        rank_zero_only(log.warning)(_nothing_to_resume(experiment))
    return found


def _nothing_to_resume(experiment: Path) -> str:
    """Return a warning that a run starts anew; a misspelt name would otherwise train everything again unnoticed.

    It is no error, because a job that a cluster starts again is started by one command, also for the first time.
    """
    said = f"WARNING: there is no last.ckpt to resume in '{experiment}': the run starts at round 0."
    beside = [folder.name for folder in experiment.parent.glob("*") if run_folder.last_checkpoint(folder) is not None]
    if not beside:
        return said
    near = nearest(experiment.name, beside)
    names = sorted(beside, key=lambda name: (name != near, name))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return (
        f"{said} There is one under these names beside it: {', '.join(names[:MOST_NAMES])}{more}. If you mean one of "
        "them, stop this run (Ctrl-C) and give that name as trainer.name."
    )
