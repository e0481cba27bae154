"""What a round costs as users run it: evaluation, tables, TensorBoard, checkpoints and progress bar, over a lean one.

    python benchmarks/rounds.py [W1 W2 W4 digits CNN] [--pairs 3] [--threads 1]

All ways train the same model, which promises its steps, by FedBC and the sequential engine, in turn in one process.
Prints CPU milliseconds of a round (medians over the turns) and their ratio: median, minimum to maximum. A lean round
trains and writes clients.csv and metrics.csv; rounds in which steps are not yet recorded are left out.

W1, W2 and W4 are those of benchmarks/engines.py. digits is configs/digits.yaml: 10 clients, 5 in a round, two epochs.
CNN is the CIFAR CNN of the FedBC paper on 20 clients of 60 to 1,000 images, 10 in a round. Each client has a quarter as
many test samples, on which its own model and the global one are evaluated after each round; digits splits its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from engines import LEAN, Clients, describe, sizes_of_synthetic
from fedbc_lightning.datamodules import DigitsDataModule
from fedbc_lightning.models import CIFARCNN, MLP, LogisticRegression
from lightning.pytorch import LightningModule

from fedbc_lightning import FedBC, FederatedDataModule, FederatedTrainer, UniformSampler
from fedbc_lightning.partition import PowerLaw


@dataclass
class Case:
    """What is trained; after ``warm_up`` rounds, ``rounds`` are timed."""

    make_data: Callable[[], FederatedDataModule]
    make_model: Callable[[], LightningModule]
    num_sampled: int
    epochs: int
    warm_up: int
    rounds: int


def _logistic() -> LightningModule:
    return LogisticRegression(60, 10, lr=0.01, momentum=0.5)


CASES = {
    "W1": Case(lambda: Clients(sizes_of_synthetic(), (60,)), _logistic, 10, 5, 8, 10),
    "W2": Case(
        lambda: Clients(np.full(100, 600), (784,)), lambda: MLP(dropout=0.0, lr=0.01, momentum=0.5), 10, 1, 5, 10
    ),
    "W4": Case(lambda: Clients(np.full(10_000, 20), (60,)), _logistic, 1000, 1, 2, 4),
    "digits": Case(
        lambda: DigitsDataModule(PowerLaw(10), batch_size=20), lambda: MLP(64, 64, 10, 0.0, lr=0.1, momentum=0.5),
        5, 2, 10, 40,
    ),
    "CNN": Case(lambda: Clients(np.geomspace(60, 1000, 20).round(), (3, 32, 32)), CIFARCNN, 10, 1, 2, 5),
}  # fmt: skip


class Stopwatch(UniformSampler):
    """Notes when each round begins; a callback would be a hook, which costs time and forbids to reuse evaluations."""

    def __call__(self, num_clients: int, num_sampled: int, seed: int, round: int) -> list[int]:
        """Sample the clients of a round."""
        starts.append(time.process_time())
        return super().__call__(num_clients, num_sampled, seed, round)


starts: list[float] = []


def measure(case: Case, data: FederatedDataModule, settings: dict[str, Any]) -> float:
    """Return CPU milliseconds of a round."""
    starts.clear()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        trainer = FederatedTrainer(
            max_rounds=case.warm_up + case.rounds + 1, clients_per_round=case.num_sampled, local_epochs=case.epochs,
            sampler=Stopwatch(), accelerator="cpu", default_root_dir=folder, seed=0, **settings,
        )  # fmt: skip
        trainer.fit(case.make_model(), data, FedBC(dual_lr=1e-3))
    return 1000 * (starts[-1] - starts[case.warm_up]) / case.rounds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--pairs", type=int, default=3, help="turns")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, {given.threads} thread(s), {given.pairs} turns, CPU milliseconds of a round")
    for name in given.cases or CASES:
        case = CASES[name]
        data, ways = case.make_data(), (LEAN, {**LEAN, "eval_every_n_rounds": 1}, {})
        turns = [
            [measure(case, data, way) for way in ways[:: -1 if turn % 2 else 1]][:: -1 if turn % 2 else 1]
            for turn in range(given.pairs)
        ]
        lean, evaluated, whole = ([turn[k] for turn in turns] for k in range(3))
        medians = "".join(f"{statistics.median(values):10.1f}" for values in (lean, evaluated, whole))
        print(
            f"{name:8}{medians}   evaluation / lean {describe(evaluated, lean)}   all / lean {describe(whole, lean)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
