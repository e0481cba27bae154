"""Finds what a run never reaches because each client starts it anew in each round: ends of schedules, Adam's means."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from fedbc_lightning.module.client_optimizers import Configured
from fedbc_lightning.module.trainer_proxy import ModuleTrainer

MAX_STEPS = 1000
"""Largest number of scheduler steps that are tried."""
COUNTS = ("current_epoch", "global_step")
FEW_STEPS = 20
"""Number of steps of the largest client in a round below which a new Adam gets nowhere in it."""
SHORT_WAY = 0.25
"""Way that a weight can go in a whole run below which random weights hardly learn: 15 rounds of 10 steps with a rate of
0.001 (0.15) left a network on digits at 10 %, and a rate of 0.01 brought it to 34 %, on milder partitions to 82 %."""
TRIAL = 10
"""Number of rounds below which a run is taken for a trial, of which nobody expects that it learns."""


def report_unreachable_rates(configured: Configured, epochs: int, steps: int, max_rounds: int) -> None:
    """Print a line if a scheduler never reaches some of its learning rates within a round of the largest client.

    Args:
        configured: Result of ``configure_optimizers`` that no client uses, since its schedulers are stepped here. If
            the call read ``self.trainer``, its schedules are assumed to fit one round.
        epochs: Number of local epochs.
        steps: Number of local steps of the largest client.
        max_rounds: Number of rounds, T; rates that all rounds together would not reach are not reported.
    """
    if configured.reads_trainer:
        return
    for config in configured.schedulers:
        if config.reduce_on_plateau:
            continue
        own = epochs if config.interval == "epoch" else steps
        within = own // config.frequency
        rates = _rates(config, configured.optimizer, min(within * max_rounds, MAX_STEPS))
        reached, last = rates[: within + 1], rates[: max(own - 1, 0) // config.frequency + 1][-1]
        beyond = [rate for rate in rates if not 0.999 * min(reached) <= rate <= 1.001 * max(reached)]
        if beyond:
            kind, unit = type(config.scheduler).__name__, "epochs" if config.interval == "epoch" else "steps"
            rank_zero_info(
                f"model: {kind} begins anew with each client and round. In {own} local {unit} its learning rate goes "
                f"from {reached[0]:g} to {last:g} and never gets to {beyond[-1]:g}: choose it for one round, let it "
                "go on (trainer.local_schedules: continue), or give it interval: round, with which it moves once per "
                "round."
            )


def report_single_steps(optimizer: Optimizer, num_single: int, num_clients: int) -> None:
    """Print a line if clients take one step in a round with Adam or a variant of it.

    Each round gives a client a new Adam, whose first step is ``lr * sign(gradient)`` but for its epsilon.

    Args:
        optimizer: The user's optimizer.
        num_single: Number of clients that take one step in a round.
        num_clients: Number of clients, N.
    """
    name = type(optimizer).__name__
    if num_single and "adam" in name.lower():
        rank_zero_info(
            f"model: {num_single} of {num_clients} clients take one step in a round, each with a new {name}, whose "
            "first step moves every weight by the learning rate, whatever the gradient. Let them take more steps "
            "(trainer.local_epochs, a smaller data.batch_size), or take SGD and an adaptive server (FedAdam)."
        )


def report_short_ways(optimizer: Optimizer, steps: int, max_rounds: int) -> None:
    """Print a line if a run with Adam can hardly move the weights: few steps in a round, few rounds, a small rate.

    A step of a new Adam moves a weight by about the learning rate, so a round moves it by at most rate times steps.

    Args:
        optimizer: The user's optimizer.
        steps: Number of local steps of the largest client; 1 is reported by :func:`report_single_steps`.
        max_rounds: Number of rounds, T.
    """
    name, rate = type(optimizer).__name__, max(float(group["lr"]) for group in optimizer.param_groups)
    way = rate * steps * max_rounds
    if "adam" in name.lower() and 1 < steps < FEW_STEPS and max_rounds >= TRIAL and 0 < way < SHORT_WAY:
        rank_zero_info(
            f"model: a step of {name}, which is new in every round, moves a weight by about the learning rate, so "
            f"{max_rounds} rounds of at most {steps} steps with {rate:g} move it by {way:.2g} at most: little for "
            f"weights that are not pretrained. Try a learning rate of {10 * rate:g}, more trainer.local_epochs, or a "
            "smaller data.batch_size."
        )


def report_restarting_counters(shim: ModuleTrainer, epochs: int, steps: int) -> None:
    """Print a line after the first round if steps read a counter that starts anew in each round.

    Args:
        shim: The module's trainer, which knows the names that were read.
        epochs: Number of local epochs.
        steps: Number of local steps of the largest client.
    """
    for name, count in zip(COUNTS, (epochs, steps), strict=True):
        if name in shim.reads:
            rank_zero_info(
                f"model: self.{name} counts from 0 in each client and round, here up to {count - 1}: what is scheduled "
                "by it never gets further. trainer.local_schedules: continue lets it count on, "
                "self.trainer.current_round counts the rounds (said once)."
            )


def _rates(config: LRSchedulerConfig, optimizer: Optimizer, num_steps: int) -> list[float]:
    """Return the largest learning rate before and after each step of a scheduler, until a step fails."""
    scheduler: Any = config.scheduler
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(num_steps + 1):
            found.append(max(float(group["lr"]) for group in optimizer.param_groups))
            try:
                scheduler.step()
            except Exception:  # such as OneCycleLR at its end
                break
    return found
