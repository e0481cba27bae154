"""Lines about a whole run that a user should not miss: nothing is measured, threads cost time, the loss grew."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.metric_names import TRAIN_LOSS, Measured
from fedbc_lightning.module.adapter import step_stage
from fedbc_lightning.run.run import Run

GROWN = 2.0
"""Least factor by which the global loss has grown: that of a model that overfits grows, too, but not in training."""
BEYOND_MEASURE = 1000.0
"""Least factor by which the training loss has grown if there is no global loss to tell that it was the clients."""
HELP = (
    "Try a smaller learning rate, trainer.gradient_clip_val: 1, or inputs near unit scale (data.standardize of tables)."
)

FEW_PARAMETERS = 10_000
"""Largest model whose steps are short in any case: beside other programs they may be long because of the threads."""
SHORT_STEP = 1e-3
"""Seconds of a step below which torch's threads cost more than they save, above all beside other programs."""
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


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


def say_that_one_thread_is_faster(run: Run, round: int, seconds: float) -> None:
    """Print a line after the second round if its steps are short, unless the user has chosen a number of threads.

    The number is neither tried nor changed: sums depend on it in their last digits, also after it is set back, for
    ``torch.set_num_threads`` ends MKL's own choice of threads.

    Args:
        run: Run whose round has ended.
        round: Number of the round; the first one also holds what is done once, such as recording a step.
        seconds: Seconds that the round took.
    """
    threads, federation = torch.get_num_threads(), run.federation
    is_chosen = threads == 1 or any(name in os.environ for name in VARIABLES)
    if round != 2 or is_chosen or run.fabric.device.type != "cpu":
        return
    num_steps = sum(record.get("num_steps", 0) for record in federation.server.records)
    is_short = federation.engine_kind == "sequential" and seconds < SHORT_STEP * num_steps / run.fabric.world_size
    if is_short or federation.layout.num_parameters <= FEW_PARAMETERS:
        rank_zero_info(
            f"torch uses {threads} threads. Steps of a model of {federation.layout.num_parameters:,} parameters as "
            "short as these are faster on one, on a busy machine many times: set the environment variable "
            "OMP_NUM_THREADS=1 for the next run (it may change the last digits of numbers)."
        )


def say_that_it_diverged(first: Mapping[str, float], last: Mapping[str, float]) -> None:
    """Print a line at the end of a run if training made the model worse, as far as that is certain.

    Clients differ, so a training loss of other clients may be larger; and the global loss of a model that overfits
    grows. So both must have grown.

    Args:
        first: The first training loss, and the metrics before training.
        last: The metrics at the end.
    """
    overall = Measured("loss").name
    both = {name: (first[name], last[name]) for name in (TRAIN_LOSS, overall) if name in first and name in last}
    grown = {name: new / old if old > 0 else 0.0 for name, (old, new) in both.items()}
    has_diverged = grown.get(TRAIN_LOSS, 0.0) > (1.0 if overall in both else BEYOND_MEASURE)
    if any(not math.isfinite(new) for _, new in both.values()):
        verdict = "is not finite"
    elif has_diverged and grown.get(overall, GROWN) >= GROWN:
        verdict = "grew in training"
    else:
        return
    said = ", ".join(f"{name} from {old:.4g} to {new:.4g}" for name, (old, new) in both.items())
    rank_zero_info(f"The loss {verdict}: {said}. {HELP}")
