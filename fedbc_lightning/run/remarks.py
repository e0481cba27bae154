"""Lines about a whole run that a user should not miss: nothing is measured, the loss grew."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.module.adapter import step_stage
from fedbc_lightning.run.run import Run


def say_that_nothing_is_measured(run: Run) -> None:
    """Print a line, before round 1, if every evaluation will be empty although evaluations are asked for."""
    if not run.settings.eval_every_n_rounds:
        return
    name, splits = type(run.user.module).__name__, [split for split in ("test", "val") if run.has_split(split)]
    if not splits:
        rank_zero_info("data: there is neither test nor validation data, so no round will be measured.")
    elif not any(step_stage(run.user.module, split) for split in splits):
        rank_zero_info(
            f"model: {name} has neither test_step nor validation_step, so no round will be measured, and tables and "
            'curves hold the training loss alone. Write test_step(self, batch, batch_idx) with self.log("test_loss", '
            "...) in it."
        )
