"""Two processes against one, one thread each, in turn within one run.

    python benchmarks/processes.py [W1 W2 W3] [--pairs 9]

Prints client-steps per second and the paired ratios (median, minimum to maximum, interval of the median), beside the
best ratio that the sampled clients allow: a client is never split, so a long one keeps the other process waiting. The
workloads and their rounds of warm-up are those of ``engines.py``; start-up and evaluation are left out.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from engines import WORKLOADS, Clients, Plain, describe

from fedbc_lightning import FedAvg, FederatedTrainer

ROUNDS = {"W1": 20, "W2": 20, "W3": 4}


def train(name: str, devices: int, folder: str) -> None:
    """What every process runs."""
    torch.set_num_threads(1)
    work = WORKLOADS[name]
    trainer = FederatedTrainer(
        max_rounds=work.warm_up + ROUNDS[name], clients_per_round=work.num_sampled, local_epochs=work.epochs,
        accelerator="cpu", devices=devices, logger=False, eval_every_n_rounds=0, enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir=folder, name="run", seed=0,
    )  # fmt: skip
    trainer.fit(Plain(work.make_net()), Clients(work.sizes, work.shape), FedAvg())


def measure(name: str, devices: int) -> tuple[float, list[list[int]]]:
    """Client-steps per second of a run in processes of its own, and the clients' steps in each round."""
    warm_up = WORKLOADS[name].warm_up
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, name, "--train", str(devices), folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        steps: dict[int, list[int]] = defaultdict(list)
        with next(Path(folder).glob("run/*/clients.csv")).open() as file:
            for row in csv.DictReader(file):
                if int(row["round"]) > warm_up:
                    steps[int(row["round"])].append(int(row["num_steps"]))
        with next(Path(folder).glob("run/*/metrics.csv")).open() as file:
            seconds = sum(
                float(row["time/round_seconds"]) for row in csv.DictReader(file) if int(row["round"]) > warm_up
            )
    return sum(map(sum, steps.values())) / seconds, list(steps.values())


def best_ratio(rounds: list[list[int]]) -> float:
    """Of the speeds of two processes and of one, when nothing is lost but by waiting for whole clients.

    Example:
        >>> best_ratio([[3, 1, 1]]), best_ratio([[2, 2], [4]])
        (1.6666666666666667, 1.3333333333333333)
    """
    longest = 0
    for steps in rounds:
        sums = {0}
        for count in steps:
            sums |= {total + count for total in sums}
        longest += min(total for total in sums if 2 * total >= sum(steps))
    return sum(map(sum, rounds)) / longest


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(ROUNDS)}; default: all")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.workloads[0], int(arguments.train[0]), arguments.train[1])
        return
    for name in arguments.workloads or ROUNDS:
        one, two = [], []
        for _ in range(arguments.pairs):
            one.append(measure(name, 1)[0])
            speed, rounds = measure(name, 2)
            two.append(speed)
        best = best_ratio(rounds)
        print(
            f"{name} steps/s: one process {statistics.median(one):.0f}, two {statistics.median(two):.0f}; ratio "
            f"{describe(two, one)}, at best {best:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
