"""Estimates the cost of a study: each algorithm is measured once in each variant, with its first seed."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from typing import Any

import pandas as pd
import torch

from fedbc_lightning.cli.printed_tables import ROUGH, show
from fedbc_lightning.core.printing import Console
from fedbc_lightning.core.units import bytes_said, duration
from fedbc_lightning.planning import Plan
from fedbc_lightning.studies.methods import Method
from fedbc_lightning.studies.parsed_runs import build, check_runs, named
from fedbc_lightning.studies.study import Study
from fedbc_lightning.studies.study_run import Run, has_ended, is_finished
from fedbc_lightning.studies.tuning import rungs


def plan_study(study: Study) -> pd.DataFrame:
    """Estimate the cost of a study, measuring its runs one after another in this process.

    Args:
        study: The study to plan.

    Returns:
        A row per variant and algorithm: the numbers of ``runs``, of ``trials`` that tune, and of both that are
        ``done`` and cost nothing more; seconds of one run; and ``rounds``, ``seconds``, ``disk``, ``bytes_up`` and
        ``bytes_down`` of what is left, tuning included.

    Raises:
        ConfigurationError: The study cannot be run as configured; the message names the run.
    """
    check_runs(study)
    # Times depend on the threads, so the estimate is taken with as many as each run will have.
    threads = torch.get_num_threads()
    torch.set_num_threads(study.threads)
    logging.disable(logging.INFO)  # each run would say the same about its data; warnings are shown
    try:
        return pd.DataFrame([_row(study, variant, method) for variant in study.variants for method in study.methods])
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)


def _row(study: Study, variant: str, method: Method) -> dict[str, Any]:
    runs = [study.run(variant, method, seed, method.first()) for seed in study.seed_list]
    # The settings of a finished run are compared with the study's, unless tuning has chosen some of them.
    done = sum((has_ended(run.folder) if method.tuned else is_finished(run)) for run in runs)
    plan = plan_run(runs[0])
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
        "rounds": rounds, "one run": plan.seconds, "seconds": share * plan.training_seconds + left * plan.start_seconds,
        "disk": left * kept, "bytes_up": round(share * plan.bytes_up), "bytes_down": round(share * plan.bytes_down),
    }  # fmt: skip


def total_seconds(rows: pd.DataFrame, num_workers: int) -> float:
    """Return the seconds of a study on all workers: an even share of the work, but at least the longest run."""
    longest = rows.loc[rows["rounds"] > 0, "one run"].max()
    return max(rows["seconds"].sum() / num_workers, 0.0 if pd.isna(longest) else longest)


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
