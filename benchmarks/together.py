"""What ``together`` makes of a study: whole ``fedbc-cli compare`` commands, in turn within one run.

    python benchmarks/together.py [synthetic-E5] [synthetic-E25] [digits] [--runs 18] [--rounds 10] [--repeats 3]

Ways: each run by itself with ``engine: sequential`` and with ``engine: vectorized``, and all of them ``together``. Each
is a process with one worker, so start-up, evaluation, tables and figures count.

Prints seconds (median, minimum to maximum) and how many times as long as together each takes, by turns: machines are
noisy, ratios carry over.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from engines import describe

WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "synthetic-E5": ("synthetic.yaml", {"trainer.local_epochs": 5, "data.seed": 0}),
    "synthetic-E25": ("synthetic.yaml", {"trainer.local_epochs": 25, "data.seed": 0}),
    "digits": ("digits.yaml", {}),
}
"""Base config and overrides."""

ALGORITHMS = {
    "FedAvg": {},
    "q-FedAvg": {"q": 0.1},
    "FedProx": {"mu": 0.1},
    "SCAFFOLD": {},
    "FedBC": {"dual_lr": 0.001},
    "FedBC, slower": {"algorithm": "FedBC", "dual_lr": 0.00001},
}

WAYS = {"sequential": ("sequential", 1), "vectorized": ("vectorized", 1), "together": ("vectorized", 64)}
"""Engine and ``together``."""


def measure(workload: str, way: str, num_runs: int, num_rounds: int) -> float:
    """Seconds of a study."""
    base, overrides = WORKLOADS[workload]
    engine, together = WAYS[way]
    settings = {**overrides, "trainer.max_rounds": num_rounds, "trainer.engine": engine}
    study = {
        "base": base, "algorithms": ALGORITHMS, "overrides": settings, "seeds": max(1, num_runs // len(ALGORITHMS)),
        "workers": 1, "together": together,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "study.yaml")
        path.write_text(yaml.safe_dump(study))
        words = [sys.executable, "-m", "fedbc_lightning", "compare", "--config", str(path)]
        started = time.perf_counter()
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
        return time.perf_counter() - started


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}; by default all")
    parser.add_argument("--runs", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    unknown = set(given.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    for workload in given.workloads or WORKLOADS:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(given.repeats):
            for way, values in seconds.items():
                values.append(measure(workload, way, given.runs, given.rounds))
        for way, values in seconds.items():
            print(
                f"{workload:14}{way:11}{statistics.median(values):8.1f} s ({min(values):.1f} to {max(values):.1f})   "
                f"/ together {describe(values, seconds['together'])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
