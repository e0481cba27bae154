"""Implements ``trainer.local_schedules: continue``: schedulers of a client go on from its earlier rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule

from fedbc_lightning.core.errors import ConfigurationError, first_line
from fedbc_lightning.core.lightning_names import overrides
from fedbc_lightning.module.client_optimizers import LASTING, Configured, configure
from fedbc_lightning.module.fast_forward import FastForward, ScheduleState
from fedbc_lightning.state.cohort import Cohort, Taken

if TYPE_CHECKING:
    from fedbc_lightning.module.adapter import UserModule
    from fedbc_lightning.state.declaration import StateDeclaration

# Names of two scalars of each client, which are also columns of `clients.csv`
EPOCHS, STEPS = "epochs_taken", "steps_taken"


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
    configured, other = configure(user), configure(user)
    if not configured.schedulers:
        return
    reads = sorted(user.shim.reads & {"current_epoch", "global_step"})
    total = max_epochs if configured.schedulers[0].interval == "epoch" else max_steps
    problem = _problem_of_kind(configured, user, reads) or _problem_of_steps(configured, other, user, total)
    if problem is not None:
        raise ConfigurationError(
            f"trainer.local_schedules: continue cannot carry the model's schedulers from round to round: {problem}; "
            "change that, or use fresh."
        )


def _problem_of_kind(configured: Configured, user: UserModule, reads: list[str]) -> str | None:
    configs = configured.schedulers
    plateau = next((config for config in configs if config.reduce_on_plateau), None)
    if plateau is not None:
        return (
            f"{type(plateau.scheduler).__name__} depends on the metrics of all earlier epochs, which are not kept (one "
            "that monitors what validation logs belongs to the server, and does go on)"
        )
    if overrides(user.module, "lr_scheduler_step", LightningModule):
        return "the module's own lr_scheduler_step may depend on more than their count"
    if len({config.interval for config in configs}) > 1 or any(
        c.interval == "step" and c.frequency > 1 for c in configs
    ):
        return "both intervals at once, or a frequency above 1 of interval step, need more than one count"
    if reads:
        return (
            f"configure_optimizers, or a scheduler that it makes, reads self.trainer.{reads[0]}, which would count "
            "twice: schedulers are given their count"
        )
    return None


def _problem_of_steps(configured: Configured, other: Configured, user: UserModule, total: int) -> str | None:
    """Move schedulers to the end of the run, step by step and from a kept state, and return why they differ, or None.

    This finds by itself what a list of classes would not: OneCycleLR that ends too early, and a scheduler whose
    ``state_dict`` leaves something out.
    """
    user.shim.reads.clear()
    kinds = ", ".join(type(config.scheduler).__name__ for config in configured.schedulers)
    fast_forward = FastForward()
    try:
        for each in (configured, other):
            fast_forward.move(each.optimizer, each.schedulers, total, "the end of the run")
    except Exception as error:
        return f"{kinds} could not be stepped {total} times ({type(error).__name__}: {first_line(error)})"
    changing = user.shim.reads - LASTING
    if changing:
        return f"{kinds} reads self.trainer.{min(changing)}, which changes, when it is stepped"
    ends = [ScheduleState.read(each.optimizer, each.schedulers).groups for each in (configured, other)]
    return f"{kinds} keeps something that its state_dict does not hold" if ends[0] != ends[1] else None
