"""Rounds in which one of two workers takes four times as long for each step, by how they share the clients.

    python benchmarks/uneven.py [--rounds 20]

Prints the median of a round's seconds behind the first three, beside the fast worker alone. Ten of 20 equal clients
train five steps each; a step waits 5 ms, at the slow worker 20, so that what else the machine does hardly counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from engines import Clients, Plain
from torch import Tensor, nn

from fedbc_lightning import FedAvg, FederatedTrainer

WAYS: dict[str, dict[str, Any]] = {
    "the fast one alone": {"devices": 1},
    "two processes, by steps": {"devices": 2},
    "two processes, by seconds": {"devices": 2, "share_by": "seconds"},
    "two actors of Ray": {"backend": "ray"},
}
SLOWNESS: list[float] = []
"""How long a step of this process waits, once it has taken one."""


class Waiting(Plain):
    """A step that waits; the first process that takes one in a folder is the fast one."""

    def __init__(self, folder: str) -> None:
        super().__init__(nn.Linear(60, 10))
        self.folder = folder

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Wait, and return the loss."""
        if not SLOWNESS:
            try:
                os.close(os.open(f"{self.folder}/fast", os.O_CREAT | os.O_EXCL))
                SLOWNESS.append(0.005)
            except FileExistsError:
                SLOWNESS.append(0.02)
        time.sleep(SLOWNESS[0])
        return super().training_step(batch, batch_idx)


def train(way: str, folder: str, num_rounds: int) -> None:
    """What every process runs."""
    torch.set_num_threads(1)
    trainer = FederatedTrainer(
        max_rounds=num_rounds, clients_per_round=10, accelerator="cpu", logger=False, eval_every_n_rounds=0,
        enable_progress_bar=False, enable_checkpointing=False, default_root_dir=folder, name="run", seed=0, **WAYS[way],
    )  # fmt: skip
    trainer.fit(Waiting(folder), Clients(np.full(20, 100), (60,)), FedAvg())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(*arguments.train, arguments.rounds)
        return
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--rounds", str(arguments.rounds), "--train", way, folder]
            done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            (table,) = Path(folder).glob("run/*/metrics.csv")
            seconds = pd.read_csv(table)["time/round_seconds"].dropna()[3:]
            print(f"{way}: {statistics.median(seconds):.2f} s", flush=True)


if __name__ == "__main__":
    main()
