"""Implements ``trainer.local_schedules: continue``: schedulers of a client go on from its earlier rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.module.client_optimizers import LASTING, Configured, configure
from fedbc_lightning.module.fast_forward import ScheduleState, step_quietly
from fedbc_lightning.state.cohort import Cohort, Taken

if TYPE_CHECKING:
    from fedbc_lightning.module.adapter import UserModule
    from fedbc_lightning.state.declaration import StateDeclaration

EPOCHS, STEPS = "epochs_taken", "steps_taken"
"""Names of two scalars of each client, which are also columns of ``clients.csv``."""
NUM_TRIED = 2
"""Number of scheduler steps that are tried before its state is copied, and again after that."""


def declare(declaration: StateDeclaration) -> None:
    """Declare the number of epochs and of steps that each client has made."""
    declaration.client_scalar(EPOCHS)
    declaration.client_scalar(STEPS)


def begin(cohort: Cohort) -> None:
    """Set the epochs and steps of earlier rounds in a cohort; the model of pooled data uses the last client's row."""
    epochs, steps = cohort[EPOCHS].tolist(), cohort[STEPS].tolist()
    cohort.taken_before = [Taken(done, int(count)) for done, count in zip(epochs, steps, strict=True)]


def end(cohort: Cohort) -> None:
    """Stage the epochs and steps that the clients have made; clients that drop out of the round keep theirs."""
    if cohort.taken_after:
        cohort.stage(EPOCHS, torch.tensor([taken.epochs for taken in cohort.taken_after], dtype=torch.float64))
        cohort.stage(STEPS, torch.tensor([taken.steps for taken in cohort.taken_after], dtype=torch.float64))


def check_schedules(user: UserModule, max_epochs: int, max_steps: int) -> None:
    """Refuse schedulers that cannot be moved to a number of epochs or steps.

    Args:
        user: The user's module.
        max_epochs: Largest number of local epochs of a client in the whole run.
        max_steps: Largest number of local steps of a client in the whole run.

    Raises:
        ConfigurationError: A scheduler cannot be moved; the message has the reason.
    """
    configured = configure(user)
    counts = sorted(user.shim.reads & {"current_epoch", "global_step"})
    if not configured.schedulers:
        return
    problem = _problem_of_kind(configured, user)
    if problem is None and counts:
        problem = (
            f"configure_optimizers, or a scheduler that it makes, reads self.trainer.{counts[0]}, which would count "
            "twice: schedulers are given their count"
        )
    if problem is None:
        total = max_epochs if configured.schedulers[0].interval == "epoch" else max_steps
        problem = _problem_of_length(configured, total) or _problem_of_state(configured, user, total)
    if problem is not None:
        raise ConfigurationError(
            f"trainer.local_schedules: continue cannot carry the model's schedulers from round to round: {problem}; "
            "change that, or use fresh."
        )


def _problem_of_kind(configured: Configured, user: UserModule) -> str | None:
    configs = configured.schedulers
    plateau = next((config for config in configs if config.reduce_on_plateau), None)
    if plateau is not None:
        return (
            f"{type(plateau.scheduler).__name__} depends on the metrics of all earlier epochs, which are not kept (one "
            "that monitors what validation logs belongs to the server, and does go on)"
        )
    if overrides(user.module, "lr_scheduler_step", LightningModule):
        return "the module's own lr_scheduler_step may depend on more than their count"
    foreign = next((config.scheduler for config in configs if not isinstance(config.scheduler, LRScheduler)), None)
    if foreign is not None:
        return f"{type(foreign).__name__} is no torch.optim.lr_scheduler.LRScheduler"
    if len({config.interval for config in configs}) > 1:
        return "some are of interval epoch and some of interval step, so that their order would have to be kept, too"
    if any(config.interval == "step" and config.frequency > 1 for config in configs):
        return "a frequency above 1 of interval step counts the batches of each epoch anew"
    return None


def _problem_of_length(configured: Configured, total: int) -> str | None:
    for config in configured.schedulers:
        scheduler, needed = config.scheduler, total // config.frequency
        if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < needed:
            return (
                f"OneCycleLR ends after {scheduler.total_steps} steps, and a client takes up to {needed} in the whole "
                "run (self.trainer.estimated_stepping_batches, or max_epochs for interval epoch, tells how many)"
            )
    return None


def _problem_of_state(configured: Configured, user: UserModule, total: int) -> str | None:
    """Copy the schedulers' state to new ones after a few steps, and return why both do not go on alike, or None."""
    other = configure(user)
    user.shim.reads.clear()
    kinds = ", ".join(type(config.scheduler).__name__ for config in configured.schedulers)
    try:
        for count in range(min(2 * NUM_TRIED, total // max(config.frequency for config in configured.schedulers))):
            if count == NUM_TRIED:
                ScheduleState.read(configured.optimizer, configured.schedulers).load(other.optimizer, other.schedulers)
            step_quietly(configured.schedulers)
            if count >= NUM_TRIED:
                step_quietly(other.schedulers)
                states = [ScheduleState.read(each.optimizer, each.schedulers).groups for each in (configured, other)]
                if states[0] != states[1]:
                    return f"{kinds} keeps something that its state_dict does not hold"
    except Exception as error:
        return f"{kinds} could not be stepped by itself ({type(error).__name__}: {first_line(error)})"
    changing = user.shim.reads - LASTING
    return f"{kinds} reads self.trainer.{min(changing)}, which changes, when it is stepped" if changing else None
