"""Gives a run that was set up the state of a checkpoint, or of the trainer's last run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.federation import checkpoint_content
from fedbc_lightning.run.hyper_parameters import hyper_parameters, refuse_other_seed, warn_of_other_settings
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.set_up import Beginning
from fedbc_lightning.state import checkpoint, row_file


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
    module.on_load_checkpoint(saved)
    rows_path = None if path is None else path.with_name(row_file.NAME)
    checkpoint_content.load_state(run.federation, state, saved["state_dict"], path, rows_path)
    run.progress.restore(ours, run.settings.max_rounds)
    if run.fn == TrainerFn.FITTING and not takes_other_seed:
        refuse_other_seed(ours["settings"], run.seed, path)
    warn_of_other_settings(ours["settings"], hyper_parameters(run))
    for callback in run.hooks.callbacks:
        run.hooks.call_callback(callback, "on_load_checkpoint", saved)
        if callback.state_key in saved["callbacks"]:
            callback.load_state_dict(saved["callbacks"][callback.state_key])
