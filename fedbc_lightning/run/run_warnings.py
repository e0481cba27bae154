"""Lines about a whole run that a user should not miss: nothing is measured, threads cost time, the loss diverged."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.federation.privacy import PrivateMessages
from fedbc_lightning.module.adapter import step_stage
from fedbc_lightning.run.divergence import divergence
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.tables import read_rows

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


def say_that_it_diverged(run: Run, folder: Path) -> None:
    """Print a line at the end of a run if its loss diverged, also in rounds before it was resumed.

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


def say_what_is_private(run: Run) -> None:
    """Print, before round 1, what ε the whole run will cost, if it trains with differential privacy."""
    privacy, participation = run.settings.privacy, run.federation.participation
    if privacy is None:
        return
    num_clients, rounds = len(participation.clients), run.settings.max_rounds
    (part,) = [part for part in run.federation.channel.parts if isinstance(part, PrivateMessages)]
    rank_zero_info(
        f"trainer.privacy: after {rounds} rounds z is ({part.epsilon(rounds):.3g}, {privacy.delta:g})-differentially "
        f"private for each client, with noise multiplier {privacy.noise_multiplier:g} and a client in a round with "
        f"probability {participation.num_sampled / num_clients:.3g}. This holds for z, not for the tables of the run."
    )
    if not privacy.secret:
        rank_zero_info(
            "trainer.privacy.secret: not given, so sampling and noise depend on the seed alone, which can be guessed. "
            "That is right for experiments; before you publish z, give a long random text that only you know."
        )
    if privacy.delta * num_clients >= 1:
        rank_zero_info(
            f"trainer.privacy.delta: {privacy.delta:g} is not below 1 / {num_clients} clients, so ε promises little; "
            "give a smaller one."
        )
