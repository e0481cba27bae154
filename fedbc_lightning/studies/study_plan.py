"""Estimates the cost of a study: each algorithm is measured once in each variant, with its first seed."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch

from fedbc_lightning.cli.printed_tables import ROUGH, show
from fedbc_lightning.core.printing import Console
from fedbc_lightning.core.units import bytes_said, duration
from fedbc_lightning.planning import Plan
from fedbc_lightning.studies.drawing import draw_curves
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.parsed_runs import build, check_runs, named
from fedbc_lightning.studies.statistics import KEYS
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run, has_ended, is_finished
from fedbc_lightning.studies.tuning import rungs
from fedbc_lightning.studies.workers import do_if_free

# Seconds of training of the longest of the short runs that show what a run takes beside its steps.
SHORT_SECONDS = 2.0
# Number of axes against which a study draws curves, and most rounds of those that are drawn to see how long it takes.
NUM_AXES, MAX_POINTS = 3, 500


def plan_study(study: Study) -> pd.DataFrame:
    """Estimate the cost of a study, measuring its runs one after another in this process.

    Args:
        study: The study to plan.

    Returns:
        A row per variant and algorithm: the numbers of ``runs``, of ``trials`` that tune, and of both that are
        ``done`` and cost nothing more; seconds of one run; and ``rounds``, ``seconds``, ``disk``, ``bytes_up`` and
        ``bytes_down`` of what is left, tuning included. ``attrs["once"]`` has the seconds of what a study does once:
        checks, the start of processes, and figures.

    Raises:
        ConfigurationError: The study cannot be run as configured; the message names the run.
    """
    started = time.perf_counter()
    check_runs(study)
    once = time.perf_counter() - started
    # Times depend on the threads, so the estimate is taken with as many as each run will have.
    threads = torch.get_num_threads()
    torch.set_num_threads(study.threads)
    logging.disable(logging.INFO)  # each run would say the same about its data; warnings are shown
    try:
        places = [*itertools.product(study.variants, study.methods)]
        plans = [plan_run(study.run(variant, m, study.seed_list[0], m.first())) for variant, m in places]
        start, beside = beside_steps(study, plans[0])
        pairs = zip(places, plans, strict=True)
        rows = pd.DataFrame([_row(study, variant, method, plan, beside) for (variant, method), plan in pairs])
        rows.attrs["once"] = once + start + drawing_seconds(study, plans[0].max_rounds)
        return rows
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)


def _row(study: Study, variant: str, method: Method, plan: Plan, beside: float) -> dict[str, Any]:
    runs = [study.run(variant, method, seed, method.first()) for seed in study.seed_list]
    # The settings of a finished run are compared with the study's, unless tuning has chosen some of them.
    done = sum((has_ended(run.folder) if method.tuned else is_finished(run)) for run in runs)
    trials, rounds = 0, (len(runs) - done) * plan.max_rounds
    for rung, num_combinations in rungs(study, method):
        count = num_combinations * len(study.tuning.seeds)
        trial = study.trial(variant, method, study.tuning.seeds[0], method.first(), rung)
        ended = min(count, sum(map(has_ended, trial.folder.parents[2].glob(f"*/rung_{rung}/seed_*"))))
        trials, done = trials + count, done + ended
        rounds += (count - ended) * trial.settings.get("trainer.max_rounds", plan.max_rounds)
    share, left = rounds / plan.max_rounds, len(runs) + trials - done  # a trial may be shorter than a run
    kept = sum(size for what, size in plan.disk.items() if "while it is written" not in what)
    return {
        "variant": variant, "algorithm": method.name, "runs": len(runs), "trials": trials, "done": done,
        "rounds": rounds, "one run": plan.seconds + beside,
        "seconds": share * plan.training_seconds + left * (plan.start_seconds + beside), "disk": left * kept,
        "bytes_up": round(share * plan.bytes_up), "bytes_down": round(share * plan.bytes_down),
    }  # fmt: skip


def beside_steps(study: Study, plan: Plan) -> tuple[float, float]:
    """Measure what a study takes beside the set-up and the steps of its runs, by two short runs in a new process.

    Args:
        study: The study.
        plan: Estimated cost of its first run.

    Returns:
        Seconds until the command and its processes do runs as fast as later, and seconds of each run.
    """
    seconds = plan.training_seconds / max(plan.max_rounds, 1)
    rounds = min(plan.max_rounds, 1 + int(SHORT_SECONDS / max(seconds, 1e-3)))
    numbers = (1, rounds) if rounds > 1 else ()  # beside longer rounds, what is written after them takes no time
    run = study.run(next(iter(study.variants)), study.methods[0], study.seed_list[0], study.methods[0].first())
    with TemporaryDirectory() as folder, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        runs = [replace(run, settings=run.settings | {"trainer.max_rounds": number}) for number in numbers]
        short = [replace(each, folder=Path(folder, str(k))) for k, each in enumerate(runs)]
        asked = time.time()
        began, *ends = pool.submit(_times, short, study.threads).result()
    start, beside = 2 * (began - asked), 0.0  # the command takes as long to start as its processes
    if ends:
        beside = max(0.0, ends[1] - ends[0] - plan.start_seconds - rounds * seconds)
        start += max(0.0, ends[0] - began - plan.start_seconds - seconds - beside)
    return start, beside


def _times(runs: Sequence[Run], threads: int) -> list[float]:
    """Do runs, and return when the first one began and when each ended."""
    torch.set_num_threads(threads)
    times = [time.time()]
    for run in runs:
        do_if_free(run, 0.0)
        times.append(time.time())
    return times


def drawing_seconds(study: Study, num_rounds: int) -> float:
    """Return the seconds of drawing the figures of a study, from those against one axis."""
    names, rounds = study.method_names, range(min(num_rounds, MAX_POINTS))
    rows = itertools.product(study.variants, names, study.seed_list, rounds)
    curves = pd.DataFrame(rows, columns=[*KEYS, "rounds"])
    curves = curves.assign(**dict.fromkeys(study.metrics, curves["rounds"]))
    started = time.perf_counter()
    with TemporaryDirectory() as folder:
        draw_curves(study, curves, Path(folder))
    return NUM_AXES * (time.perf_counter() - started)


def total_seconds(rows: pd.DataFrame, num_workers: int) -> float:
    """Return the seconds of a study: an even share of the work, but at least the longest run, and what is done once."""
    longest = rows.loc[rows["rounds"] > 0, "one run"].max()
    return rows.attrs["once"] + max(rows["seconds"].sum() / num_workers, 0.0 if pd.isna(longest) else longest)


def plan_run(run: Run) -> Plan:
    """Return the estimated cost of one run in a process that has imported torch.

    Raises:
        ConfigurationError: The run cannot be done as configured; the message names it.
    """
    started = time.perf_counter()
    built = build(run, "plan")
    seconds = time.perf_counter() - started
    with contextlib.redirect_stdout(io.StringIO()), named(run):
        plan = built.trainer.plan(**built.method_arguments("plan"))
    plan.start_seconds += seconds
    return plan


def print_study_plan(study: Study, rows: pd.DataFrame) -> None:
    """Print the estimated cost of a study: a row per variant and algorithm, and the total."""
    console, workers = Console(highlight=False), study.num_workers * (study.jobs if study.has_jobs else 1)
    said = {"one run": duration, "seconds": duration, "disk": bytes_said, "bytes_up": bytes_said,
            "bytes_down": bytes_said}  # fmt: skip
    shown = rows.drop(columns="rounds").assign(**{name: rows[name].map(form) for name, form in said.items()})
    header = ["variant", "algorithm", "runs", "tuning", "done", "one run", "all", "disk", "up", "down"]
    show(console, str(study.name), [header, *shown.astype(str).to_numpy().tolist()])
    up, down, disk = (bytes_said(int(rows[name].sum())) for name in ("bytes_up", "bytes_down", "disk"))
    console.print(
        f"[bold]about {duration(total_seconds(rows, workers))} on {workers} worker{'s' * (workers > 1)}[/bold], "
        f"{disk} on disk, {up} up, {down} down. Finished runs (done) cost nothing more.",
        soft_wrap=True,
    )
    console.print(ROUGH, style="dim", soft_wrap=True)
