"""How long it takes to evaluate many clients: z on the data of each, and each one's own model.

    python benchmarks/evaluation.py [--pairs 5] [--clients 1000] [--threads 1]

Both engines in turn, in one process. Prints milliseconds of an evaluation and of the round before it (medians over the
turns), and how many times as fast the vectorized engine is: median, minimum to maximum. Models: logistic 60-10, MLP
784-128-10 and the FedBC paper's CIFAR CNN, with FedBC and 10 clients sampled. Test samples of a client: 5 to 11 of
equal shares, or log-normal (median 8, sigma 1: from 1 to a hundred or two).
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from engines import Clients, describe
from fedbc_lightning.models import CIFARCNN, MLP, LogisticRegression
from lightning.pytorch import LightningModule

from fedbc_lightning import FedBC, FederatedTrainer

NUM_TRAINING_SAMPLES = 20


@dataclass
class Case:
    """What is evaluated."""

    shape: tuple[int, ...]
    make_model: Callable[[], LightningModule]
    is_log_normal: bool = False


CASES = {
    "logistic": Case((60,), lambda: LogisticRegression(60, 10)),
    "logistic, log-normal sizes": Case((60,), lambda: LogisticRegression(60, 10), is_log_normal=True),
    "MLP": Case((784,), lambda: MLP(dropout=0.0)),
    "CIFAR CNN": Case((3, 32, 32), CIFARCNN),
}


def sizes_of(case: Case, num_clients: int) -> np.ndarray:
    """Test samples of each client."""
    if case.is_log_normal:
        return np.random.default_rng(0).lognormal(np.log(8), 1.0, num_clients).round().clip(1).astype(int)
    return 5 + np.arange(num_clients) % 7


def measure(case: Case, data: Clients, engine: Literal["sequential", "vectorized"], rounds: int) -> tuple[float, float]:
    """Seconds of an evaluation and of a round: medians, without the first two."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=rounds, clients_per_round=10, engine=engine, accelerator="cpu", logger=False, seed=0,
            enable_progress_bar=False, enable_checkpointing=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(case.make_model(), datamodule=data, algorithm=FedBC(dual_lr=1e-3))
        with Path(trainer.log_dir, "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))[3:]
    names = "time/eval_seconds", "time/round_seconds"
    return statistics.median(float(r[names[0]]) for r in rows), statistics.median(float(r[names[1]]) for r in rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="turns")
    parser.add_argument("--clients", type=int, default=1000, help="N, all of them evaluated")
    parser.add_argument("--rounds", type=int, default=6, help="evaluations in a turn, 3 or more")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} thread(s), {arguments.pairs} turns, N = {arguments.clients}")
    print(f"{'milliseconds':28} {'a round':>8} {'sequential':>11} {'vectorized':>11}   times as fast")
    for name, case in CASES.items():
        data = Clients(np.full(arguments.clients, NUM_TRAINING_SAMPLES), case.shape, sizes_of(case, arguments.clients))
        turns = [
            [measure(case, data, engine, arguments.rounds) for engine in ("sequential", "vectorized")]
            for _ in range(arguments.pairs)
        ]
        one, many = ([1000 * turn[k][0] for turn in turns] for k in (0, 1))
        a_round = 1000 * statistics.median(turn[0][1] for turn in turns)
        print(
            f"{name:28} {a_round:8.1f} {statistics.median(one):11.1f} {statistics.median(many):11.1f}   "
            f"{describe(one, many)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
