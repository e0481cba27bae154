"""Lines about a whole run that a user should not miss: nothing is measured, threads cost time, the loss diverged."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import TRAIN_LOSS, is_lower_better, measured
from fedbc_lightning.federation.privacy import PrivateMessages
from fedbc_lightning.module.adapter import step_stage
from fedbc_lightning.run.hyper_parameters import say_what_is_left_out
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.tables import read_rows

# A step of such a model is shorter than the hand-over of work to torch's threads, above all beside other programs.
FEW_PARAMETERS = 10_000


def say_what_to_expect(run: Run) -> None:
    """Print, before round 1, whether nothing will be measured, whether threads cost time, and what ε will be."""
    splits = [split for split in ("test", "val") if run.has_split(split)]
    if run.settings.eval_every_n_rounds and not any(step_stage(run.user.module, split) for split in splits):
        missing = f"{type(run.user.module).__name__} has neither test_step nor validation_step"
        rank_zero_info(
            f"{missing if splits else 'There is neither test nor validation data'}, so no round will be measured: "
            "tables and curves hold the training loss alone."
        )
    threads, size = torch.get_num_threads(), run.federation.layout.num_parameters
    is_chosen = any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    # The number is not changed here: sums depend on it in their last digits, also after it is set back.
    if threads > 1 and not is_chosen and run.fabric.device.type == "cpu" and size <= FEW_PARAMETERS:
        rank_zero_info(
            f"torch uses {threads} threads. Steps of a model of {size:,} parameters are faster on one: set the "
            "environment variable OMP_NUM_THREADS=1 (it may change the last digits of numbers)."
        )
    say_what_is_left_out(run.user.module)
    if run.settings.privacy is not None:
        _say_what_is_private(run)


def _say_what_is_private(run: Run) -> None:
    privacy, participation, rounds = run.settings.privacy, run.federation.participation, run.settings.max_rounds
    assert privacy is not None
    num_clients = len(participation.clients)
    (part,) = [part for part in run.federation.channel.parts if isinstance(part, PrivateMessages)]
    rank_zero_info(
        f"trainer.privacy: after {rounds} rounds z is ({part.epsilon(rounds):.3g}, {privacy.delta:g})-differentially "
        f"private for each client, with noise multiplier {privacy.noise_multiplier:g} and a client in a round with "
        f"probability {participation.num_sampled / num_clients:.3g}. This holds for z, not for the tables of the run, "
        f"and promises little unless delta is far below 1 / {num_clients} clients."
    )
    if not privacy.secret:
        rank_zero_info(
            "trainer.privacy.secret: not given, so sampling and noise depend on the seed alone, which can be guessed. "
            "That is right for experiments; before you publish z, let it name a long random text that only you know."
        )


def say_that_it_diverged(run: Run, folder: Path) -> None:
    """Print a line at the end of a run if its loss is not finite, also in rounds before it was resumed.

    Args:
        run: Run that has ended.
        folder: Its run folder.
    """
    if not run.fabric.is_global_zero:  # another machine may not see the folder
        return
    with suppress(OSError, ConfigurationError):  # a table that was edited or moved is told of where it is needed
        found = divergence(read_rows(folder / "metrics.csv"))
        if found is not None:
            rank_zero_info(found)


def divergence(rows: Sequence[Mapping[str, str]]) -> str | None:
    """Return a sentence that says since when a loss of a run is not finite, and what to try; None if all are.

    Args:
        rows: Rows of ``metrics.csv`` as texts by name; an empty text is a metric that the round does not have.
    """
    # A loss that only grew proves nothing: other clients were sampled, or the model overfits.
    since: dict[str, int] = {}  # the first round from which on a loss is not finite
    for name in rows[0] if rows else []:
        found = measured(name)
        if name == TRAIN_LOSS or (found is not None and found.place == "global" and is_lower_better(name)):
            for row in reversed([row for row in rows if row[name]]):
                if math.isfinite(float(row[name])):
                    break
                since[name] = int(row["round"])
    if not since:
        return None
    return (
        f"The loss is not finite from round {min(since.values())} on ({', '.join(since)}). Try a smaller learning rate "
        "or server step, trainer.gradient_clip_val: 1, or inputs near unit scale (data.standardize of tables)."
    )
