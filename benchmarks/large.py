"""Time and memory of a client whose model is large: FedAvg, FedBC, SCAFFOLD and a loop by hand, and what `plan` said.

    python benchmarks/large.py [MLP ResNet18 Transformer] [--millions 10] [--pairs 1] [--rounds 3] [--defaults]

Every way runs in a process of its own, in turn, because the peak of memory is that of a process. A client takes one
step on 20 samples, so that what is done beside the step counts; 4 of 8 clients are sampled, by plain SGD, one thread.

Prints CPU milliseconds of a client (median of the rounds but the first, and of the turns), that time over FedAvg's,
the peak of memory in sizes of the model beyond what the process held before, when it had trained a small model, and
the peak that ``plan`` foretold, over that which was measured; both are of the whole process. The first
round is left out of the times. ``--defaults`` evaluates and writes checkpoints and TensorBoard's files, as users do.

MLP is 784-n-n-10, Transformer two encoder layers over 16 vectors, both with about so many millions of parameters;
ResNet18 has GroupNorm, and 11 millions at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import LEAN, Clients, Plain
from fedbc_lightning.models import ResNet18GroupNorm
from gpu import Transformer
from torch import nn
from torch.nn import functional

from fedbc_lightning import SCAFFOLD, FedAvg, FedBC, FederatedTrainer, UniformSampler
from fedbc_lightning.core.machine import peak_memory

SAMPLED, SAMPLES, LR = 4, 20, 0.01
METHODS = {"FedAvg": FedAvg, "FedBC": lambda: FedBC(dual_lr=1e-3, dual_init=1e-3), "SCAFFOLD": SCAFFOLD}
WAYS = ("by hand", *METHODS)


def mlp(width: int) -> nn.Module:
    """Return an MLP with two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


MODELS: dict[str, tuple[Callable[[float], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda size: mlp(int(size**0.5) - 390), (784,)),
    "ResNet18": (lambda size: ResNet18GroupNorm(10, lr=LR), (3, 32, 32)),
    "Transformer": (lambda size: Transformer(4 * int((size / 24) ** 0.5 / 4)), (16, 64)),
}


class Stopwatch(UniformSampler):
    """Notes when each round begins; a callback would be a hook, for which copies of weights are taken."""

    def __call__(self, num_clients: int, num_sampled: int, seed: int, round: int) -> list[int]:
        """Sample the clients of a round."""
        starts.append(time.process_time())
        return super().__call__(num_clients, num_sampled, seed, round)


starts: list[float] = []


def by_hand(net: nn.Module, data: Clients, rounds: int) -> None:
    """Train FedAvg by a plain loop, with float64 sums."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    z = nn.utils.parameters_to_vector(net.parameters()).detach()
    for _ in range(rounds + 2):
        starts.append(time.process_time())
        total = torch.zeros(len(z), dtype=torch.float64)
        for inputs, targets in data.arrays[:SAMPLED]:
            nn.utils.vector_to_parameters(z.clone(), net.parameters())
            optimizer.zero_grad()
            functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
            total += nn.utils.parameters_to_vector(net.parameters()).detach()
        z = (total / SAMPLED).float()


def make_trainer(folder: str, method: str, rounds: int, defaults: bool) -> FederatedTrainer:
    """Return a trainer of a way, with all defaults or lean."""
    settings: dict[str, Any] = {} if defaults else LEAN
    return FederatedTrainer(
        max_rounds=rounds, clients_per_round=SAMPLED, local_epochs=1, sampler=Stopwatch(), accelerator="cpu",
        engine="sequential", default_root_dir=folder, name=method, seed=0, **settings,
    )  # fmt: skip


def resident() -> int:
    """Return the bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(model: str, way: str, size: float, rounds: int, *, defaults: bool, plans: bool) -> dict[str, Any]:
    """Train, or plan, in this process, and return what it took."""
    make, shape = MODELS[model]
    sizes = np.full(2 * SAMPLED, SAMPLES)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            small = make_trainer(folder, "FedBC", 2, defaults)
            small.fit(Plain(mlp(8), lr=LR, momentum=0.0), Clients(sizes, (784,)), METHODS["FedBC"]())
            torch.manual_seed(0)
            data, before = Clients(sizes, shape), resident()
            net = make(size)
            trained = net if way == "by hand" else Plain(net, lr=LR, momentum=0.0)
            num_parameters = sum(parameter.numel() for parameter in net.parameters())
            found: dict[str, Any] = {"parameters": num_parameters}
            starts.clear()
            if way == "by hand":
                by_hand(net, data, rounds)
            elif plans:
                plan = make_trainer(folder, way, rounds + 2, defaults).plan(trained, data, METHODS[way]())
                return found | {"planned": plan.memory}
            else:
                make_trainer(folder, way, rounds + 2, defaults).fit(trained, data, METHODS[way]())
        times = [1000 * (end - begin) / SAMPLED for begin, end in pairwise(starts[1:])]
    peak = peak_memory()
    return found | {"ms": statistics.median(times), "sizes": (peak - before) / 4 / num_parameters, "peak": peak}


def measured_elsewhere(*words: str) -> dict[str, Any]:
    """Measure in a new process."""
    done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--millions", type=float, default=10, help="of parameters")
    parser.add_argument("--pairs", type=int, default=1, help="turns")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are timed in a turn")
    parser.add_argument("--defaults", action="store_true", help="with evaluation, checkpoints and TensorBoard's files")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--plans", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.way:
        size = 1e6 * given.millions
        print(json.dumps(measure(
            given.models[0], given.way, size, given.rounds, defaults=given.defaults, plans=given.plans
        )))  # fmt: skip
        return
    print(f"torch {torch.__version__}, 1 thread, {given.pairs} turns", flush=True)
    options = ["--millions", str(given.millions), "--rounds", str(given.rounds), *["--defaults"] * given.defaults]
    for model in given.models or MODELS:
        turns = [{way: measured_elsewhere(model, "--way", way, *options) for way in WAYS} for _ in range(given.pairs)]
        for way in WAYS:
            first, ms = turns[0][way], statistics.median(turn[way]["ms"] for turn in turns)
            ratio = statistics.median(turn[way]["ms"] / turn["FedAvg"]["ms"] for turn in turns)
            line = f"{model:12}{first['parameters']:>12,}  {way:9}{ms:8.0f} ms {ratio:6.2f}{first['sizes']:7.1f} sizes"
            if way in METHODS:
                planned = sum(measured_elsewhere(model, "--way", way, "--plans", *options)["planned"].values())
                line += f"   plan {planned / 2**20:6.0f} MiB, measured {first['peak'] / 2**20:6.0f} MiB"
            print(line, flush=True)


if __name__ == "__main__":
    main()
