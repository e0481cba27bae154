"""Lines about a whole run that a user should not miss: nothing is measured, clients are missing, the loss diverged."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.metric_names import MISSING, TRAIN_LOSS, is_lower_better, measured
from fedbc_lightning.federation.privacy import PrivateMessages
from fedbc_lightning.run.hyper_parameters import say_what_is_left_out
from fedbc_lightning.run.run import Run
from fedbc_lightning.run.tables import read_rows

# A step of such a model is shorter than the hand-over of work to torch's threads, above all beside other programs.
FEW_PARAMETERS = 10_000


def say_what_to_expect(run: Run) -> None:
    """Print, before round 1, whether threads cost time, and what ε will be."""
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


def say_that_nothing_is_measured(run: Run) -> None:
    """Print, after an evaluation that measured nothing, why it did not."""
    why = f"{type(run.user.module).__name__} has neither a test_step nor a validation_step that logs a value"
    if not run.splits:
        without_test = "There is no validation data, and trainer.eval_test is false"
        why = "There is neither test nor validation data" if run.settings.eval_test else without_test
    rank_zero_info(f"{why}, so no round will be measured: tables and curves hold the training loss alone.")


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


def say_what_came_of_it(run: Run, folder: Path) -> None:
    """Print lines at the end of a run if rounds had too few clients or its loss is not finite, since its beginning.

    Args:
        run: Run that has ended.
        folder: Its run folder.
    """
    if not run.fabric.is_global_zero:  # another machine may not see the folder
        return
    with suppress(OSError, ConfigurationError):  # a table that was edited or moved is told of where it is needed
        for line in remarks(read_rows(folder / "metrics.csv")):
            rank_zero_info(line)


def remarks(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return what the rows of ``metrics.csv`` say of a run that a reader should not miss, a sentence each."""
    return [found for found in (shortfall(rows), divergence(rows)) if found is not None]


def shortfall(rows: Sequence[Mapping[str, str]]) -> str | None:
    """Return a sentence that says how many clients were missing in the rounds of a run; None if none was.

    Args:
        rows: Rows of ``metrics.csv``, as for :func:`divergence`.

    Example:
        >>> shortfall([{"round": "0"}, {"round": "1", "num_clients/absent": "3"}, {"round": "2"}])
        'In 1 of 2 rounds fewer clients had a part than trainer.clients_per_round asks for, on average 1.5 fewer.'
    """
    missing = [sum(float(row.get(f"num_clients/{why}") or 0) for why in MISSING) for row in rows if row["round"] != "0"]
    if not any(missing):
        return None
    return (
        f"In {sum(map(bool, missing))} of {len(missing)} rounds fewer clients had a part than "
        f"trainer.clients_per_round asks for, on average {sum(missing) / len(missing):.3g} fewer."
    )


def divergence(rows: Sequence[Mapping[str, str]]) -> str | None:
    """Return a sentence that says since when a loss of a run is not finite, and what to try; None if all are.

    Args:
        rows: Rows of ``metrics.csv`` as texts by name; an empty text is a metric that the round does not have.
    """
    # A loss that only grew proves nothing: other clients were sampled, or the model overfits.
    since = {}  # the first round from which on a loss is not finite
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
