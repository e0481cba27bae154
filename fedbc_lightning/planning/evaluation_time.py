"""Measures how long an evaluation takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from fedbc_lightning.data.datasets import num_items
from fedbc_lightning.evaluation.evaluator import Evaluator
from fedbc_lightning.evaluation.measurement import Measurement, Task
from fedbc_lightning.federation.federation import Federation
from fedbc_lightning.module.adapter import step_stage

MAX_EVALUATION_SECONDS = 1.5
"""Time limit for evaluating clients, per split and kind of model; the rest is estimated by numbers of samples."""


class EvaluationTime(NamedTuple):
    """The measured cost of one evaluation of the initial model.

    Attributes:
        seconds: Seconds of one evaluation.
        num_values: Number of values that it gives for each client.
        num_metrics: Rough number of metrics that it logs.
    """

    seconds: float = 0.0
    num_values: int = 0
    num_metrics: int = 0


def time_evaluation(
    federation: Federation, evaluator: Evaluator, splits: list[str], num_processes: int
) -> EvaluationTime:
    """Measure an evaluation of z of round 0; the module holds this z afterwards, too.

    Args:
        federation: A federation that has been set up, in one process.
        evaluator: Evaluates its models.
        splits: The splits for which there are data.
        num_processes: Number of processes that will share the clients in the run.
    """
    datamodule, models = federation.datamodule, federation.models()
    total, longest, num_values, num_metrics = 0.0, 0.0, 0, 0
    for split in splits:
        stage = step_stage(federation.user.module, split)
        if stage is None:
            continue
        what = Measurement(split, stage, models, 0)
        tasks = evaluator.tasks(split, models)
        sizes, rate = datamodule.num_samples(split), None
        # Both kinds of models are timed: a local one is loaded for each client, and may be fine-tuned first.
        for which in ("global", "local"):
            mine = [task for task in tasks if task[0] == which and task[1] >= 0]
            if mine:
                seconds, samples, width = _evaluate_some(evaluator, mine, what)
                rate = seconds / samples if rate is None else rate
                total += seconds / samples * int(sizes[[client for _, client in mine]].sum())
                num_values, num_metrics = num_values + width, num_metrics + 3 * width
        pooled = datamodule.pooled_dataset(split)
        if pooled is not None and ("global", -1) in tasks:
            seconds = (rate or 0.0) * num_items(pooled)
            if seconds < MAX_EVALUATION_SECONDS:
                started = time.perf_counter()
                evaluator.one_by_one([("global", -1)], what)
                seconds = time.perf_counter() - started
            total, longest = total + seconds, max(longest, seconds)
    total += _time_fine_tuning(evaluator, evaluator.measurements(splits, models, 0))
    if total < MAX_EVALUATION_SECONDS and federation.engine.mapped_evaluation("test") is not None:
        for _ in range(2):  # the first mapped evaluation does the clients one after another as well
            started = time.perf_counter()
            evaluator.run(splits, models, 0)
        total = min(total, time.perf_counter() - started)
    federation.load_global()
    # Clients are dealt to the processes, but the pooled data are evaluated by one of them.
    return EvaluationTime(max(total / num_processes, longest), num_values, num_metrics)


def _time_fine_tuning(evaluator: Evaluator, wanted: Sequence[Measurement]) -> float:
    """Estimate the seconds of fine-tuning on held-out clients, from the first of the clients that train together."""
    fine_tuned = evaluator.fine_tuned
    if not fine_tuned.num_steps or not wanted or not evaluator.heldout_ids:
        return 0.0
    seconds = count = 0.0
    for cohort in fine_tuned.cohorts():
        started = time.perf_counter()
        fine_tuned.evaluate_cohort(cohort, wanted)
        seconds, count = seconds + time.perf_counter() - started, count + len(cohort)
        if seconds > MAX_EVALUATION_SECONDS:
            break
    return seconds * len(evaluator.heldout_ids) / count


def _evaluate_some(evaluator: Evaluator, tasks: Sequence[Task], what: Measurement) -> tuple[float, int, int]:
    """Evaluate the first tasks, and return their seconds, their samples, and the number of values of each."""
    sizes = evaluator.datamodule.num_samples(what.split)
    samples = width = 0
    started = time.perf_counter()
    for task in tasks:
        found = evaluator.one_by_one([task], what)
        samples, width = samples + int(sizes[task[1]]), len(found.get(task, {}))
        if time.perf_counter() - started > MAX_EVALUATION_SECONDS:
            break
    return time.perf_counter() - started, samples, width
